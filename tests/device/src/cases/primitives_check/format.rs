//! The 16-bit float formats by their definition: a grid of numbers in f64.

/// A format of one sign bit, exponent bits and mantissa bits.
#[derive(Clone, Copy)]
pub(super) struct Format {
    exponent_bits: u32,
    mantissa_bits: u32,
}

pub(super) const BF16: Format = Format {
    exponent_bits: 8,
    mantissa_bits: 7,
};
pub(super) const F16: Format = Format {
    exponent_bits: 5,
    mantissa_bits: 10,
};

fn power(exponent: i32) -> f64 {
    2_f64.powi(exponent)
}

impl Format {
    const fn bias(self) -> i32 {
        (1 << (self.exponent_bits - 1)) - 1
    }

    const fn infinity(self) -> u16 {
        ((1 << self.exponent_bits) - 1) << self.mantissa_bits
    }

    /// The number with this code.
    pub(super) fn decode(self, code: u16) -> f64 {
        let magnitude = code & 0x7fff;
        let mantissa = f64::from(magnitude & ((1 << self.mantissa_bits) - 1));
        let exponent = i32::from(magnitude >> self.mantissa_bits);
        let scale = power(exponent.max(1) - self.bias() - self.mantissa_bits as i32);
        let value = match magnitude {
            m if m > self.infinity() => f64::NAN,
            m if m == self.infinity() => f64::INFINITY,
            _ if exponent == 0 => mantissa * scale,
            _ => (mantissa + power(self.mantissa_bits as i32)) * scale,
        };
        if code >> 15 == 1 { -value } else { value }
    }

    /// The code of the nearest number, ties to even; `None` for NaN, which has many codes.
    pub(super) fn encode(self, x: f32) -> Option<u16> {
        if x.is_nan() {
            return None;
        }
        let sign = u16::from(x.is_sign_negative()) << 15;
        let value = f64::from(x).abs();
        let smallest = 1 - self.bias();
        // Position of the exponent in f64. Every f32 is zero or a normal f64.
        let exponent = (value.to_bits() >> 52) as i32 - 1023;
        let unit = power(exponent.max(smallest) - self.mantissa_bits as i32);
        let steps = (value / unit).round_ties_even();
        if value.is_infinite() || steps * unit >= power(self.bias() + 1) {
            return Some(sign | self.infinity());
        }
        // Subnormal codes count units of the smallest exponent, and each higher exponent continues the count.
        let per_exponent = power(self.mantissa_bits as i32);
        let exponents_above = f64::from(exponent.max(smallest) - smallest);
        Some(sign | (exponents_above * per_exponent + steps) as u16)
    }

    /// Whether two codes are the same number or both NaN.
    pub(super) fn same(self, got: u16, want: Option<u16>) -> bool {
        match want {
            Some(want) => got == want,
            None => got & 0x7fff > self.infinity(),
        }
    }
}
