"""Why a model cannot be loaded or a device not used: the configuration is at fault, trying again would not help."""


class LoadError(ValueError):
    """The one cause, in words for the user."""
