"""Tasks of lm-eval: of a model on disk (`python -m jaxpipe.evaluate`), and within a run."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from jaxpipe.checkpoint.hf.serving import ServingFiles
from jaxpipe.config import ConfigError
from jaxpipe.data.optional import import_optional
from jaxpipe.inference.harness import PURPOSE, harness_model
from jaxpipe.inference.loaded_model import LoadedModel
from jaxpipe.inference.saved_model import SavedModel
from jaxpipe.inference.settings import evaluation_config
from jaxpipe.inference.text import TextTokenizer, tokenizer_of, with_tokenizer
from jaxpipe.training.state import State
from jaxpipe.training.trainer import Trainer

LONGEST = 2048  # tokens of a sequence for a model of any length, as in the harness


@dataclass(frozen=True)
class Tasks:
    """Tasks of the harness by their names.

    Attributes:
      names: of tasks, tags or groups.
      manager: the harness's `TaskManager`.
      limit: examples per task; None: all.
    """

    names: tuple[str, ...]
    manager: Any
    limit: int | None = None

    @classmethod
    def find(cls, names: Sequence[str], folder: str = "", limit: int | None = None) -> Self:
        """Find tasks, also in a folder of the user's own.

        Raises `ConfigError` where lm-eval is not installed, or has no task of a name.
        """
        library = import_optional("lm_eval.tasks", PURPOSE, "eval")
        manager = library.TaskManager(include_path=folder or None)
        if unknown := [name for name in names if name not in manager.all_tasks]:
            raise ConfigError(
                f"lm-eval has no task {unknown[0]!r}: `lm-eval ls tasks` lists them, and "
                f"--include-path or train.evaluate_include_path adds yours."
            )
        return cls(tuple(names), manager, limit)

    def evaluate(self, model: Any, **options: Any) -> dict[str, Any]:
        """Return the harness's results.

        Args:
          model: as `harness_model` returns it.
          **options: of `lm_eval.simple_evaluate`.
        """
        harness = import_optional("lm_eval", PURPOSE, "eval")
        return harness.simple_evaluate(
            model=model,
            tasks=list(self.names),
            task_manager=self.manager,
            limit=self.limit,
            **options,
        )


def numbers_of(results: dict[str, Any]) -> dict[str, float]:
    """The metrics of the harness's results as `tasks/<task>/<metric>`, without standard errors.

    >>> found = {"arc": {"alias": "arc", "acc,none": 0.25, "acc_stderr,none": 0.1}}
    >>> numbers_of({"results": found})
    {'tasks/arc/acc': 0.25}
    """
    return {
        f"tasks/{task}/{name.removesuffix(',none')}": float(value)
        for task, found in results["results"].items()
        for name, value in found.items()
        if isinstance(value, int | float) and "_stderr" not in name and name != "sample_len"
    }


@dataclass(frozen=True, eq=False)
class RunTasks:
    """Tasks of a run, evaluated on its mesh; every process calls it.

    Attributes:
      tasks: the tasks.
      trainer: of the run.
      saved: what the run's checkpoints hold besides parameters.
      tokenizer: of the run's data.
    """

    tasks: Tasks
    trainer: Trainer
    saved: SavedModel
    tokenizer: TextTokenizer

    @classmethod
    def open(cls, trainer: Trainer, serving: ServingFiles) -> Self:
        """Find the tasks and the tokenizer of a run.

        Raises `ConfigError` where there is no such task, or the data have no tokenizer.
        """
        config = trainer.config
        train, place = config.train, Path(config.run.dir)
        tasks = Tasks.find(
            train.evaluate_tasks, train.evaluate_include_path, train.evaluate_limit or None
        )
        saved = SavedModel(place, config.model, serving, config, _not_on_disk, {})
        saved = with_tokenizer(saved, train.evaluate_tokenizer)
        return cls(tasks, trainer, saved, tokenizer_of(saved))

    def __call__(self, state: State) -> dict[str, float]:
        """The metrics of the parameters that a held-out loss evaluates, by name."""
        model = self._model
        model.loaded.params, model.loaded.variables = self.trainer.averaged(state), state.variables
        try:
            results = self.tasks.evaluate(model, bootstrap_iters=0)
        finally:
            model.loaded.params = model.loaded.variables = None  # the next step overwrites them
        return numbers_of(results or {"results": {}})

    @cached_property
    def _model(self) -> Any:
        """The harness's model, with the run's mesh and layers; it keeps its compiled programs."""
        longest = self.saved.longest or LONGEST
        plan = replace(self.trainer.plan, config=evaluation_config(self.trainer.config, longest))
        loaded = LoadedModel(self.saved, replace(self.trainer, plan=plan), None, None)
        return harness_model(loaded, self.tokenizer, longest)


def _not_on_disk(paths: Sequence[Any]) -> list[Any]:
    raise NotImplementedError("the parameters are on the run's devices")
