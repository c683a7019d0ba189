"""What can go wrong between a stored model and the device, each with the object, the byte range and what to do."""

from typing import Any, ClassVar

ByteRange = tuple[int, int]


class ColdStartError(Exception):
    """Base. `range` is `(first byte, byte after the last)` within the object, or None when all of it is meant."""

    advice: ClassVar[str] = ""

    def __init__(self, object: str, range: ByteRange | None = None, reason: str = "") -> None:
        super().__init__(object, range, reason)
        self.object = object
        self.range = range
        self.reason = reason

    def __str__(self) -> str:
        where = f" bytes {self.range[0]}-{self.range[1] - 1}" if self.range else ""
        advice = f"; {self.advice}" if self.advice else ""
        return f"{self.object}{where}: {self.reason}{advice}"

    def as_dict(self) -> dict[str, Any]:
        return {
            "type": type(self).__name__,
            "object": self.object,
            "range": list(self.range) if self.range else None,
            "reason": self.reason,
            "message": str(self),
        }


class ObjectMissing(ColdStartError):
    """The store has no such object."""

    advice = "check the store URL, or publish the model again"


class ObjectTruncated(ColdStartError):
    """Fewer bytes than the manifest or the server announced."""

    advice = "publish the model again"


class ObjectAltered(ColdStartError):
    """The bytes read are not the bytes that were published (checksum)."""

    advice = "the stored object is damaged: publish the model again"


class ObjectChanged(ColdStartError):
    """The object was replaced after the manifest was written (ETag)."""

    advice = "load again with the manifest that is stored now, or publish the model again"


class StoreUnavailable(ColdStartError):
    """The store didn't answer, refused, or kept failing until the time budget was spent."""

    advice = "check endpoint, credentials and permissions, then load again"


class ManifestInvalid(ColdStartError):
    """A manifest, a safetensors header or a shard index contradicts itself or its files."""

    advice = "the model's files are inconsistent: fetch or export them again, then publish"


class UnsupportedModel(ColdStartError):
    """The model is well formed, but not one that can be loaded here."""


class FetchCancelled(ColdStartError):
    """The fetch was cancelled by its owner."""
