"""The folder of a comparison, with a file for every finished run, so that an interrupted one can go
on.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from fusion_bench_nufilt.methods.options import DeviceConfig, ProtocolConfig
from fusion_bench_nufilt.pages.content import References, SeedRun, check_references
from fusion_bench_nufilt.utils.files import file_name, lock_folder, read_json
from fusion_bench_nufilt.utils.finished import FinishedFile, OtherWorkError
from fusion_bench_nufilt.utils.manifest import Difference, differences
from fusion_bench_nufilt.utils.options import with_scope

from .specs import RunSpec

_DELETE = "delete it, and it is made again"


class _Settings(TypedDict):
    modelpool: str
    weights: dict[str, str]


class _RunFile(TypedDict):
    label: str
    seed: int


def _config_differences(run: SeedRun, config: Mapping[str, Any]) -> list[Difference]:
    if run.error is not None:  # it is repeated
        return []
    return differences(_without_options_of_runs(run.config), _without_options_of_runs(config))


def _without_options_of_runs(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a method's configuration its results depend on."""
    of_the_run = with_scope([ProtocolConfig, DeviceConfig], "run")
    return {key: value for key, value in config.items() if key not in of_the_run}


class Store:
    """The files of a comparison, given the settings that every run depends on besides the models'
    weights, and what else is told of it, on which no result depends.

    Results of the same comparison in the folder are kept, or with ``overwrite`` deleted once the
    models are known. A folder is refused if it holds results of other settings or if another
    process holds it.
    """

    def __init__(
        self,
        folder: Path,
        settings: dict[str, Any],
        *,
        about: Mapping[str, Any] | None = None,
        overwrite: bool = False,
    ) -> None:
        self.folder = folder
        self._about = about or {}
        self.settings = {**self._about, **settings}
        advice = "delete what it belongs to by hand"
        self._comparison = FinishedFile(
            folder / "compare.json", _Settings, advice, self._setting_differences
        )
        self._references = FinishedFile(folder / "references.json", References, _DELETE)
        self._lock = lock_folder(folder)
        try:
            # Deleted only by `identify`, when it is certain that the next comparison can begin.
            self._overwrites = overwrite
            if overwrite:
                self._files_to_delete()
            else:
                self._refuse_other(self._comparison, settings)
        except BaseException:
            self.close()
            raise

    def _setting_differences(
        self, saved: _Settings, settings: Mapping[str, Any]
    ) -> list[Difference]:
        saved_settings = dict(saved)
        # The weights are compared by `identify`, once the models have been read.
        for key in ("weights", *self._about):
            saved_settings.pop(key, None)
        return differences(saved_settings, settings)

    def identify(self, digests: dict[str, str]) -> None:
        """Save the settings and the digests of the models' weights; refuse weights that differ from
        those there.
        """
        saved = None
        if self._overwrites:
            self._delete()
        else:
            saved = self._comparison.content()
        if saved is not None:
            # A folder or a hub name may hold another model than when the results were made.
            differing = differences(saved["weights"], digests)
            if differing:
                raise self._refused(
                    f"holds results of other models: '{differing[0].name}' has other weights there"
                )
        self.settings = {**self.settings, "weights": digests}
        # Last: without this file, a folder is no comparison's.
        self._comparison.keep(self.settings)
        self._overwrites = False

    def close(self) -> None:
        self._lock.release()

    def _files_to_delete(self) -> list[Path]:
        """Return the comparison's files in the folder; refuse any that no comparison made."""
        runs = sorted(self.folder.glob("runs/*/*.json"))
        if self._comparison.content() is None and runs:
            raise ValueError(
                f"'{self.folder}' has no compare.json: its runs/ is no comparison's and is not "
                "deleted"
            )
        for file in runs:
            # Through a link, files of somebody else would be deleted.
            if any(path.is_symlink() for path in (file, file.parent, file.parent.parent)):
                raise ValueError(
                    f"'{file}' is, or lies behind, a link that no comparison made: remove it by "
                    "hand"
                )
            advice = "if it is not of this comparison, move it elsewhere, else delete it"
            read_json(file, _RunFile, advice)
        return [*runs, self._references.file]

    def _delete(self) -> None:
        for file in self._files_to_delete():
            file.unlink(missing_ok=True)
        for folder in [*self.folder.glob("runs/*"), self.folder / "runs"]:
            with suppress(OSError):  # holds something else, or is not there
                folder.rmdir()

    def load(self, spec: RunSpec, config: dict[str, Any], order: Sequence[str]) -> SeedRun | None:
        """Return the finished run of a method, or None; refuse one of another configuration or of
        other tasks.
        """
        finished = self._run(spec, config)
        self._refuse_other(finished, config, f"'{spec.label}' with ")
        run = finished.whole()
        if run is None or run.error is not None:
            return None
        if run.tasks != order:
            # The order follows from the seed: another one is no setting, but a damaged file.
            tasks = ", ".join(order)
            raise ValueError(
                f"'{finished.file}' is damaged, field 'tasks': must be {tasks}, in this order; "
                f"{_DELETE}"
            )
        return run

    def save(self, spec: RunSpec, run: SeedRun) -> None:
        content = {"label": spec.label, "seed": run.config["seed"], **asdict(run)}
        self._run(spec, run.config).keep(content)

    def load_references(self, tasks: Sequence[str]) -> References | None:
        if self._overwrites:
            return None
        references = self._references.whole()
        if references is not None:
            try:
                check_references(references, tasks)
            except ValueError as error:
                file = self._references.file
                raise ValueError(f"'{file}' is damaged, {error}; {_DELETE}") from None
        return references

    def save_references(self, references: References) -> None:
        self._references.keep(references)

    def _run(self, spec: RunSpec, config: dict[str, Any]) -> FinishedFile[SeedRun]:
        file = self.folder / "runs" / file_name(spec.label) / f"{config['seed']}.json"
        return FinishedFile(file, SeedRun, _DELETE, _config_differences)

    def _refuse_other(
        self, finished: FinishedFile[Any], description: Mapping[str, Any], owner: str = ""
    ) -> None:
        try:
            finished.refuse_other(description)
        except OtherWorkError as error:
            raise self._refused(f"holds results of {owner}other settings: {error}") from None

    def _refused(self, reason: str) -> ValueError:
        return ValueError(
            f"{self.folder} {reason}. Choose another folder or label, or delete them with "
            "--overwrite"
        )
