"""The exit codes of all commands.

`python -m jaxpipe.runtime.exit_code` prints those after which a restart does not help, as a pattern
of `grep -E`.
"""

from enum import IntEnum


class ExitCode(IntEnum):
    """Why a command ended; 128 + n: signal n stopped it, after the step in progress was saved.

    `launch/slurm.sbatch` starts a job again after signals, and where `may_pass` is true.
    """

    DONE = 0
    FAILED = 1  # what was computed is wrong: a loss that is not finite, an error that is too large
    BAD_INPUT = 2  # also memory that does not suffice, and a run.dir that is in use
    OTHERS_GONE = 3  # another process has exited or never connected
    NOT_SAVED = 4  # the last step could not be saved
    HANG = 5  # no progress within the limit
    CORRUPTION = 6  # a device computes wrong numbers
    NO_ANSWER = 7  # storage did not answer for longer than the limit
    CRASH = 70  # an error that nothing expected, with its traceback (EX_SOFTWARE of sysexits.h)
    INTERRUPTED = 130  # 128 + SIGINT

    @property
    def may_pass(self) -> bool:
        """Whether the same command may get further when it is started again."""
        return self in (self.OTHERS_GONE, self.HANG, self.NO_ANSWER, self.CRASH)


if __name__ == "__main__":
    ends = [ExitCode.DONE, ExitCode.INTERRUPTED]
    print("|".join(str(int(code)) for code in ExitCode if not code.may_pass and code not in ends))
