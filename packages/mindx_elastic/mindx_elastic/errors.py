"""The exceptions of this package. Imports nothing."""


class MindxElasticError(Exception):
    """Base of every error that this package raises."""


class DamagedFileError(MindxElasticError):
    """A file is missing, incomplete, or not what its name says. The text names it and the reason.

    A start that meets one goes on without the file; nothing needs to be done.
    """


class MissingFrameworkError(MindxElasticError, ImportError):
    """The framework that this part works for is not installed.

    Install it, or leave the part out.
    """


class StepWentOnError(MindxElasticError):
    """The optimizer has begun the next step, so that what was written is no whole one: save anew.

    Not raised to users.
    """
