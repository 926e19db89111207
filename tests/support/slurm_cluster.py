"""A real Slurm on this machine: munged, slurmctld and a slurmd per node, in a temporary directory.

It needs root and Debian's packages slurmctld, slurmd, slurm-client and munge, listens on its own
loopback ports and shares no file with a Slurm that the machine may have.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
# The first node's name must resolve (jax uses it for the coordinator), the others' need not.
NODES = (socket.gethostname(), f"{socket.gethostname()}b")
CPUS_PER_NODE = 4
GRACE_SECONDS = 120  # from the signal of preemption to the kill
CREDENTIAL_SECONDS = 5  # a requeued job starts this much later; Slurm's default is 120

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={credential}
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=2
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout=20
SlurmctldTimeout=10
InactiveLimit=0
KillWait=60
MessageTimeout=30
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
{nodes}
PartitionName=low Nodes=ALL Default=YES State=UP PriorityTier=1 GraceTime={grace}
PartitionName=high Nodes=ALL State=UP PriorityTier=10 PreemptMode=OFF
"""


def why_not() -> str | None:
    """Return the reason why no cluster can be started here, or None."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"needs Slurm: no {', '.join(missing)} on PATH"
    if os.geteuid() != 0:
        return "needs root, to start a Slurm"
    try:
        socket.gethostbyname(NODES[0])
    except OSError:
        return f"needs a host name that resolves, not {NODES[0]!r}"
    return None


class Cluster:
    """A running cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        self.daemons: dict[str, subprocess.Popen] = {}

    def start(self) -> None:
        """Start all daemons and wait for the nodes."""
        self.folder.chmod(0o711)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        own = {
            name: self.folder / f"munge.{name}" for name in ("socket", "pid-file", "log", "seed")
        }
        self._run_daemon(
            "munged", "--force", "--foreground", f"--key-file={key}", f"--socket={own['socket']}",
            f"--pid-file={own['pid-file']}", f"--log-file={own['log']}",
            f"--seed-file={own['seed']}",
        )  # fmt: skip
        wait_for(own["socket"].exists, 20, "munged listens")
        (self.folder / "state").mkdir()
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        port, *ports = _free_ports(1 + len(NODES))
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={NODES[0]} NodeAddr=127.0.0.1 Port={port} "
            f"CPUs={CPUS_PER_NODE} RealMemory=1000 State=UNKNOWN"
            for name, port in zip(NODES, ports, strict=True)
        )
        (self.folder / "slurm.conf").write_text(
            CONFIGURATION.format(
                host=NODES[0],
                port=port,
                folder=self.folder,
                nodes=nodes,
                grace=GRACE_SECONDS,
                credential=CREDENTIAL_SECONDS,
            )
        )  # fmt: skip
        self._run_daemon("slurmctld", "-D", "-c")
        self.start_nodes(*NODES)

    def start_nodes(self, *nodes: str) -> None:
        """Start the slurmd of these nodes, and wait until all nodes can take jobs."""
        for node in nodes:
            (self.folder / f"spool-{node}").mkdir(exist_ok=True)
            self._run_daemon("slurmd", "-D", "-N", node, name=node)
        wait_for(lambda: self._nodes_up() == len(NODES), 60, f"all nodes are up, with {nodes}")

    def kill_node(self, node: str) -> None:
        """Kill a node with all its processes, as a power failure would."""
        steps = [pid for pid in _processes() if self._is_step(pid) and self._is_on(pid, node)]
        daemon = self.daemons.pop(node)
        for pid in (daemon.pid, *steps, *_descendants(daemon.pid, *steps)):
            _kill(pid)
        daemon.wait()

    def command(self, *words: str | Path, cwd: Path | None = None) -> str:
        """Return the standard output of a Slurm command, which must succeed."""
        done = subprocess.run(
            words, cwd=cwd, env=self.environment, capture_output=True, text=True, timeout=60,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    def job(self, job: str) -> dict[str, str]:
        """Return Slurm's record of a job: JobState, Restarts, ExitCode, ..."""
        words = self.command("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def stop(self) -> None:
        """End all daemons and jobs."""
        steps = [pid for pid in _processes() if self._is_step(pid)]
        daemons = [daemon.pid for daemon in self.daemons.values()]
        for pid in (*daemons, *steps, *_descendants(*daemons, *steps)):
            _kill(pid)
        for daemon in self.daemons.values():
            daemon.wait()

    def _run_daemon(self, program: str, *words: str, name: str | None = None) -> None:
        with (self.folder / f"{name or program}.out").open("a") as out:
            self.daemons[name or program] = subprocess.Popen(
                [program, *words], env=self.environment, stdin=subprocess.DEVNULL, stdout=out,
                stderr=subprocess.STDOUT, cwd=self.folder,
            )  # fmt: skip

    def _nodes_up(self) -> int:
        words = ("sinfo", "--noheader", "--Node", "--partition=low", "--format=%t")
        done = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, check=False
        )
        return done.stdout.split().count("idle")

    def _is_step(self, pid: int) -> bool:
        """Return whether a process is a step of this cluster: it has the cluster's environment."""
        path = Path("/proc", str(pid))
        with contextlib.suppress(OSError):
            if path.joinpath("comm").read_text().strip() == "slurmstepd":
                own = f"SLURM_CONF={self.folder}/slurm.conf".encode()
                return own in path.joinpath("environ").read_bytes().split(b"\0")
        return False

    def _is_on(self, pid: int, node: str) -> bool:
        spool = self.folder / f"spool-{node}"
        with contextlib.suppress(OSError):
            for file in Path("/proc", str(pid), "fd").iterdir():
                target = Path(os.readlink(file))
                if spool in target.parents or target == self.folder / f"slurmd-{node}.log":
                    return True
        return False


@contextlib.contextmanager
def running_cluster() -> Iterator[Cluster]:
    """Yield a cluster; at the end stop it with all its jobs, and remove its files."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: a socket path has 108 bytes
    cluster = Cluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


def wait_for(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Return when the condition holds; fail if it does not in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} seconds: {what}"
        time.sleep(0.2)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _descendants(*roots: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for pid in _processes():
        with contextlib.suppress(OSError):
            stat = Path("/proc", str(pid), "stat").read_text()
            children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(pid)
    found, queue = [], list(roots)
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
