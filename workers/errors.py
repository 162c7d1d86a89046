"""Errors of the worker that another start with the same configuration would repeat."""


class LoadError(ValueError):
    """The model cannot be loaded, or the device not used; the text is shown to users."""
