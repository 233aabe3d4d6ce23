"""`MeanTeacher`: a part of the model that follows another part as a moving average."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.callbacks.arguments import SHARE, TEXT, check
from paceline.callbacks.callback import Callback
from paceline.callbacks.run import Run
from paceline.errors import ConfigError


class MeanTeacher(Callback):
    """After each step, teacher = decay × teacher + (1 − decay) × student; buffers are copied.

    Both are modules of the model, given by name. The teacher starts as a copy of the student. It is saved with the
    weights of the model, so this callback has no state.
    """

    needs_step_metrics = False

    def __init__(self, teacher: str = "teacher", student: str = "student", decay: float = 0.999) -> None:
        check("MeanTeacher", TEXT, teacher=teacher, student=student)
        check("MeanTeacher", SHARE, decay=decay)
        self.teacher, self.student, self.decay = teacher, student, decay

    def on_start(self, run: Run) -> None:
        """Check the modules; copy the student's weights to the teacher at the beginning of the run."""
        import torch

        modules = dict(run.model.named_modules())
        for name in (self.teacher, self.student):
            if name not in modules:
                raise ConfigError(
                    f"MeanTeacher: the model has no module {name!r}; it has {', '.join(filter(None, modules))}"
                )
        teacher, student = modules[self.teacher], modules[self.student]
        shapes = [{name: value.shape for name, value in each.state_dict().items()} for each in (teacher, student)]
        if shapes[0] != shapes[1]:
            raise ConfigError(f"MeanTeacher: {self.teacher} and {self.student} have different weights")
        if any(parameter.requires_grad for parameter in teacher.parameters()):
            raise ConfigError(
                f"MeanTeacher: {self.teacher} is also trained by the optimizer; "
                f"call {self.teacher}.requires_grad_(False) in model_fn"
            )
        self._averages, self._weights = list(teacher.parameters()), list(student.parameters())
        self._copies, self._buffers = list(teacher.buffers()), list(student.buffers())
        if run.step_number == 0:
            with torch.no_grad():
                torch._foreach_copy_(self._averages, self._weights)
                self._copy_buffers()

    def on_step(self, run: Run, metrics: Mapping[str, float | None]) -> None:
        """Update the teacher."""
        import torch

        with torch.no_grad():
            torch._foreach_lerp_(self._averages, self._weights, 1 - self.decay)
            self._copy_buffers()

    def _copy_buffers(self) -> None:
        for copy, buffer in zip(self._copies, self._buffers, strict=True):
            copy.copy_(buffer)
