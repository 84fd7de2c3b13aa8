"""Numbers from codes with scales, and back: one codec for each format."""

from __future__ import annotations

from collections.abc import Mapping

from raymerge.checkpoints.codecs.codec import (
    Codec,
    Encoded,
    ErrorSums,
    NotFiniteError,
    load_scales,
    store_scales,
)
from raymerge.checkpoints.codecs.fp8 import Fp8
from raymerge.checkpoints.codecs.int4 import Int4
from raymerge.checkpoints.codecs.mxfp4 import Mxfp4
from raymerge.checkpoints.codecs.nvfp4 import Nvfp4
from raymerge.checkpoints.quantisation.encoding import Format

__all__ = ["Codec", "Encoded", "ErrorSums", "NotFiniteError", "codec_of", "load_scales", "store_scales"]

_CODECS: Mapping[Format, Codec] = {
    Format.FP8_BLOCK: Fp8(),
    Format.FP8_CHANNEL: Fp8(),
    Format.FP8_TENSOR: Fp8(),
    Format.MXFP4: Mxfp4(),
    Format.MXFP4_ROWS: Mxfp4(),
    Format.INT4: Int4(),
    Format.NVFP4: Nvfp4(),
}


def codec_of(form: Format) -> Codec:
    """The codec of a format."""
    return _CODECS[form]
