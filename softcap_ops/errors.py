"""The package's own exception."""


class UnsupportedError(NotImplementedError):
    """No backend can serve a call, or the one asked for by name cannot.

    The message holds each backend's reason; the original cause, where there is one, is chained.
    """
