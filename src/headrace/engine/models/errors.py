"""Why a model cannot be loaded."""

from __future__ import annotations

__all__ = ["ModelError"]


class ModelError(Exception):
    """The files of a model are broken or of a kind that is not supported.

    The message names the file or kind at fault and is shown to the operator as it is.
    """
