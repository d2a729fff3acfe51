//! Tables of quantized weights: the values that codes stand for, and the thresholds between them.
//!
//! They are those of bitsandbytes, bit for bit. Values are shortest decimals that give the same f32.

/// Values of the 16 codes of NF4: quantiles of the normal distribution, scaled to -1..=1.
pub(crate) static NF4: [f32; 16] = [
    -1.0,
    -0.6961928,
    -0.52507305,
    -0.3949175,
    -0.28444138,
    -0.18477343,
    -0.091050036,
    0.0,
    0.0795803,
    0.1609302,
    0.2461123,
    0.33791524,
    0.44070983,
    0.562617,
    0.72295684,
    1.0,
];

/// A value takes the NF4 code whose index is the number of these below it.
pub(crate) static NF4_THRESHOLDS: [f32; 15] = [
    -0.8480964,
    -0.6106329,
    -0.45999527,
    -0.33967942,
    -0.2346074,
    -0.13791174,
    -0.045525018,
    0.03979015,
    0.12025525,
    0.20352125,
    0.29201376,
    0.38931254,
    0.50166345,
    0.6427869,
    0.86147845,
];

/// Values of the 16 codes of FP4; bit 3 of a code is the sign.
pub(crate) static FP4: [f32; 16] = [
    0.0,
    0.0052083335,
    0.6666667,
    1.0,
    0.33333334,
    0.5,
    0.16666667,
    0.25,
    0.0,
    -0.0052083335,
    -0.6666667,
    -1.0,
    -0.33333334,
    -0.5,
    -0.16666667,
    -0.25,
];

/// A magnitude takes the code in [`FP4_RANKED`] whose index is the number of these below it.
pub(crate) static FP4_THRESHOLDS: [f32; 7] = [
    0.00260417, 0.0859375, 0.20833333, 0.29166666, 0.4166667, 0.583333, 0.8333333,
];

/// Codes of FP4 without sign, ascending by value.
pub(crate) static FP4_RANKED: [u8; 8] = [0, 1, 6, 7, 4, 5, 2, 3];
