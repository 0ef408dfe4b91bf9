"""Codes of refusals, misses and errors: one for each thing that a user can look up. A code never changes its meaning.

attn_compiler/code_pages explains each one, with an example and a remedy. A retired code is never reused. AC1xx: the machine and its
libraries. AC2xx: q, k and v. AC3xx: masks and scores. AC4xx: what was asked for, and what is faster. AC5xx: misses. AC6xx: padding that
stays. AC7xx: DTensors. AC8xx: faults. AC9xx: errors that are raised.
"""

from __future__ import annotations

from enum import StrEnum


class Code(StrEnum):
    """A code. Its value is shown in reports: "AC201"."""

    # The machine and its libraries.
    SWITCHED_OFF = "AC101"
    DEVICE = "AC102"
    ARCHITECTURE = "AC103"
    SEVERAL_ARCHITECTURES = "AC104"
    LIBRARY_MISSING = "AC105"
    LIBRARY_VERSION = "AC106"
    KNOWN_BUG = "AC107"
    DETERMINISTIC = "AC108"
    PACKAGED = "AC109"
    INTERPRETER = "AC110"
    NO_PLAN = "AC111"
    NOT_COMPILED = "AC112"
    MEMORY = "AC113"

    # q, k and v.
    DTYPE = "AC201"
    SEVERAL_DTYPES = "AC202"
    SOFTMAX_DTYPE = "AC203"
    SHAPES = "AC204"
    EMPTY = "AC205"
    SYMBOLIC = "AC206"
    HEAD_GROUPS = "AC207"
    HEAD_DIM = "AC208"
    HEAD_DIMS_DIFFER = "AC209"
    TOO_LARGE = "AC210"
    LAYOUT = "AC211"
    GRADIENT = "AC212"
    DROPOUT = "AC213"
    WEIGHTS_READ = "AC214"
    LENGTHS = "AC215"
    LATENT = "AC216"
    LSE_READ = "AC217"

    # Masks and scores.
    SOFTCAP = "AC301"
    SINKS = "AC302"
    SCORE_CHANGE = "AC303"
    SCALE = "AC304"
    DIAGONAL = "AC305"
    CAUSAL_AND_TENSOR = "AC306"
    MASK_KIND = "AC307"
    MASK_TENSOR = "AC308"
    MASK_SHAPE = "AC309"
    MASK_DTYPE = "AC310"
    TWO_TENSORS = "AC311"
    LARGE_NUMBERS = "AC312"
    KEYLESS_ROWS = "AC313"
    BIAS_GRADIENT = "AC314"

    # What was asked for, and what is faster.
    FP8_NOT_ASKED = "AC401"
    FP8_RECIPE = "AC402"
    FP8_SLOWER = "AC403"
    OWN_KERNEL = "AC404"
    NOTHING_LEFT_OUT = "AC405"
    IN_ORDER_SLOWER = "AC406"
    ADDED_SLOWER = "AC407"
    OWN_IS_FASTEST = "AC408"

    # Misses: near an attention, and not read as one.
    BEFORE_SOFTMAX = "AC501"
    AFTER_SOFTMAX = "AC502"
    SOFTMAX_AXIS = "AC503"
    SCORES_READ = "AC504"
    SINK_COLUMN = "AC505"
    PRODUCT_ADDS = "AC506"
    AXES = "AC507"
    ARGUMENTS = "AC508"
    INSIDE_A_CALL = "AC509"
    TRANSFORM = "AC510"
    CHOSEN_BY_SCOPE = "AC511"
    GRADIENT_STOPPED = "AC512"
    RESHAPED_IN_PLACE = "AC513"
    CLOSED_TENSOR = "AC514"
    AUTOCAST_BODY = "AC515"
    OTHER_OUTPUT = "AC516"
    LIBRARY_KERNEL = "AC517"
    LIBRARY_ARGUMENTS = "AC518"
    FLEX_CALL = "AC519"
    FLEX_BLOCK_MASK = "AC520"
    WRITTEN_BY_HAND = "AC521"
    LINEAR_ATTENTION = "AC522"
    LEFT_TO_PYTHON = "AC523"
    LINEAR_NOT_PROVED = "AC524"

    # Padding that stays (`options={"unpad": True}`).
    MIXES_POSITIONS = "AC601"
    PADDING_MASK = "AC602"
    PADDING_OTHER_CALLS = "AC603"
    PADDING_CACHE = "AC604"
    PADDING_DRAWN = "AC605"
    PADDING_NO_KERNEL = "AC606"
    PADDING_TOKENS = "AC607"
    PADDING_SIZES = "AC608"
    PADDING_WRITTEN = "AC609"
    PADDING_OUT_OF_REACH = "AC610"

    # DTensors.
    SHARDED_SEQUENCE = "AC701"
    PLACEMENTS = "AC702"
    SHARDED_DROPOUT = "AC703"
    UNEQUAL_SHARES = "AC704"
    NO_LOCAL_ATTENTION = "AC705"

    # Faults: a failure on our side, which leaves the model as it was there.
    FAULT = "AC801"
    COMPILER_REFUSED = "AC802"

    # Errors that are raised.
    UNKNOWN_OPTION = "AC901"
    INVALID_OPTION = "AC902"
    UNSUPPORTED_TORCH = "AC903"
    LOWERING_UNAVAILABLE = "AC904"
    FP8_RECIPE_UNUSED = "AC905"
    FP8_STATE = "AC906"
    NOT_AN_EXPORTED_PROGRAM = "AC907"
    EXPORT_UNSUPPORTED = "AC908"
    PASS_FAILED = "AC909"
    COMPILE_FAILED = "AC910"
    VERIFY_FAILED = "AC911"
    VERIFICATION_MISMATCH = "AC912"
    CUDNN_REFUSED = "AC913"
    CONTEXT_PARALLEL_UNSUPPORTED = "AC914"
    CONTEXT_PARALLEL_INPUT = "AC915"
    REPORT_NOT_SAVED = "AC916"
    KERNEL_FAILED = "AC917"
    CANNOT_COMPARE = "AC918"
