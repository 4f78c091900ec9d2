"""`BadSample`: why a sample cannot be trained on. `encode.encoder` catches it and counts the drop."""


class BadSample(Exception):
    """This sample cannot be trained on; `reason` is a key of `drops.REASONS`, `detail` is for people."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


# What processors raise on images and videos that they cannot take: beside ValueErrors of their own, those of
# arithmetic with sizes that become 0, torch's, and one for a size that MiniCPM-V's sets only where it resizes
REFUSALS = (ArithmeticError, LookupError, NameError, RuntimeError, TypeError, ValueError)


def refused_by_processor(error: Exception) -> BadSample:
    """The BadSample that says what a processor raised on the media of a sample, one of REFUSALS."""
    text = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
    return BadSample("processor_error", text)
