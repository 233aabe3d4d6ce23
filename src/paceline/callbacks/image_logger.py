"""`ImageLogger`: images that the model generates, or that visualise it, in TensorBoard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from paceline.callbacks.arguments import COUNT, FUNCTION, TEXT, check
from paceline.callbacks.callback import Callback
from paceline.callbacks.run import Run
from paceline.errors import ConfigError

if TYPE_CHECKING:
    import torch


class ImageLogger(Callback):
    """Logs the images that `images(model)` returns, after each evaluation or every `every_steps` steps.

    It is called on all ranks, in evaluation mode and without gradients, with keyed random numbers: the images are the
    same on any number of ranks. They are (C, H, W) or a batch of them, with values between 0 and 1 or bytes.
    """

    needs_step_metrics = False

    def __init__(
        self,
        images: Callable[[torch.nn.Module], torch.Tensor],
        *,
        name: str = "images",
        every_steps: int | None = None,
    ) -> None:
        check("ImageLogger", FUNCTION, images=images)
        check("ImageLogger", TEXT, name=name)
        if every_steps is not None:
            check("ImageLogger", COUNT, every_steps=every_steps)
        self.images, self.name, self.every_steps = images, name, every_steps

    def on_evaluate(self, run: Run, metrics: Mapping[str, float | None]) -> None:
        """Log images, unless they are logged by steps."""
        if self.every_steps is None:
            self._log(run)

    def on_step(self, run: Run, metrics: Mapping[str, float | None]) -> None:
        """Log images every few steps."""
        if self.every_steps is not None and run.step_number % self.every_steps == 0:
            self._log(run)

    def _log(self, run: Run) -> None:
        import torch

        was_training = run.model.training
        run.model.eval()
        try:
            with torch.no_grad():
                images = self.images(run.model)
        finally:
            run.model.train(was_training)
        shape = tuple(getattr(images, "shape", ()))
        if len(shape) not in (3, 4):
            what = f"the shape {shape}" if hasattr(images, "shape") else f"a {type(images).__name__} of images"
            raise ConfigError(
                f"ImageLogger(name={self.name!r}) got {what}; an image is (C, H, W) "
                "with 1, 3 or 4 channels, or a batch (N, C, H, W) of them; images[None] adds a channel to (H, W)"
            )
        run.log(**{self.name: images})
