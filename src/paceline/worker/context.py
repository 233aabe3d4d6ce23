"""`Context`: config, run folder, process group and reporting of one rank, in one object."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.config import Config
from paceline.observe.events import VERSION, Events
from paceline.observe.progress import Progress
from paceline.run.layout import RunFolder
from paceline.run.provenance import origin_of
from paceline.world import World


@dataclass(frozen=True)
class Context:
    """One rank of one run: its config as written, its run folder, its process group, and its reporting."""

    config: Config
    folder: RunFolder
    world: World
    events: Events
    progress: Progress
    _warned: set[str] = field(default_factory=set, repr=False)

    def warn(self, text: str) -> None:
        """Write a warning to the events, from rank 0."""
        self.events.write("warning", text=text)

    def report_step_mode(self, text: str) -> None:
        """Write how steps are executed to the events, from rank 0."""
        self.events.write("step_mode", text=text)

    def warn_once(self, text: str) -> None:
        """Write a warning, unless it was written before."""
        if text not in self._warned:
            self._warned.add(text)
            self.warn(text)


def open_context(
    config: Config, folder: RunFolder, world: World, progress: Progress, *, is_held: bool = False
) -> Context:
    """The context of a run, whose events start with `run_started`; held events are written when they are released."""
    events = Events(folder.events if world.is_main else None, is_held=is_held)
    context = Context(config, folder, world, events, progress)
    if world.is_main:
        events.write(
            "run_started", version=VERSION, name=config.name, run_dir=str(folder.path), seed=config.seed,
            world_size=world.size, lanes=config.lanes or world.size, device=world.device.type, backend=world.backend,
            **origin_of(config.folder, world.device),
        )  # fmt: skip
        for text in world.warnings:
            context.warn(text)
    return context
