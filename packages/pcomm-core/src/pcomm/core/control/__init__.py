"""The control plane: how ranks agree, who they are, and which generation of them counts."""

from typing import TYPE_CHECKING

from pcomm.core.face import face

if TYPE_CHECKING:
    from pcomm.core.control.agreement import agree_on_lines, fail_together
    from pcomm.core.control.control import Control
    from pcomm.core.control.default import control_of_group, default_control
    from pcomm.core.control.failure_flag import FailureFlag

__all__ = [
    "Control",
    "FailureFlag",
    "agree_on_lines",
    "control_of_group",
    "default_control",
    "fail_together",
]

__getattr__, __dir__ = face(
    __name__,
    {
        "Control": "control",
        "FailureFlag": "failure_flag",
        "agree_on_lines": "agreement",
        "control_of_group": "default",
        "default_control": "default",
        "fail_together": "agreement",
    },
)
