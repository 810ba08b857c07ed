"""The package's own exception."""


class UnsupportedError(NotImplementedError):
    """No backend can serve a call, or the one asked for by name cannot; or a transform (vmap, DTensor) cannot.

    The message holds each backend's reason; the original cause, where there is one, is chained.
    """


class OnnxExportError(Exception):
    """A call that ONNX cannot express is being exported.

    Not a RuntimeError: in fall-through mode the TorchScript exporter takes those as leave to write the op as it is.
    """
