"""Where the files of a run are in its pods (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from paceline.errors import ConfigError


@dataclass(frozen=True)
class Places:
    """The current folder here and in the pods, and the folders at which volumes are mounted there."""

    here: Path
    workdir: str | None  # the folder in the pods that corresponds to `here`; None for the same path
    mounts: Sequence[str]

    @property
    def there(self) -> str:
        """The working folder in the pods."""
        return self.workdir or str(self.here)

    def check_workdir(self) -> None:
        """Raise a ConfigError if it is no absolute path."""
        text = self.workdir
        if text is not None and not (text.startswith("/") and text.isprintable() and "/../" not in f"{text}/"):
            raise ConfigError(f"--workdir {text!r} must be an absolute path in the pods, such as /shared/lab")

    def of(self, path: Path) -> str:
        """The path in the pods of a path here."""
        path = self.here / path
        inside = path.relative_to(self.here) if path.is_relative_to(self.here) else None
        return str(PurePosixPath(self.there) / inside if inside is not None else path)

    def of_config(self, path: Path) -> str:
        """The path of a config, which the pods must see."""
        found = self.of(path)
        is_in_image = self.workdir is not None and PurePosixPath(found).is_relative_to(self.workdir)
        if not is_in_image and not self._is_mounted(found):
            raise ConfigError(
                f"{path} is in no volume of the pods ({', '.join(self.mounts)}); start this in the folder of the "
                "project, and name that folder in the pods with --workdir PATH"
            )
        return found

    def of_run(self, path: Path) -> str:
        """The path of a run folder, which must outlive the pods."""
        found = self.of(path)
        if not self._is_mounted(found):
            raise ConfigError(
                f"the run folder {found} is in no volume of the pods ({', '.join(self.mounts)}), so it would be lost "
                "with them; choose a --run-dir or a --workdir in a volume"
            )
        return found

    def _is_mounted(self, path: str) -> bool:
        return any(PurePosixPath(path).is_relative_to(mount) for mount in self.mounts)
