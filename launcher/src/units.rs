//! Parsing and formatting of quantities: bytes, counts, durations.

use crate::lang::{Text, text};

/// Parses a number of bytes, such as `64G`, `512MiB`, `1.5 GiB` or `5e8`.
///
/// K, M, G, T and KiB, MiB, … are powers of 1024. KB, MB, GB and TB are powers of 1000.
///
/// # Errors
/// The text is no number, has an unknown unit, or is negative or too large.
pub fn parse_bytes(text: &str) -> Result<u64, Text> {
    let text = text.trim();
    // The exponent of 5e8 belongs to the number.
    let mut split = text.len();
    for (index, letter) in text.char_indices() {
        let exponent = matches!(letter, 'e' | 'E')
            && text[index + 1..].starts_with(|next: char| next.is_ascii_digit() || next == '+');
        if letter.is_ascii_alphabetic() && !exponent {
            split = index;
            break;
        }
    }
    let (number, unit) = text.split_at(split);
    let number: f64 = number
        .trim()
        .parse()
        .map_err(|_| text!("'{text}' is not a number of bytes", "'{text}' 不是字节数"))?;
    let scale = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "k" | "kib" => 1024.0,
        "m" | "mib" => 1024f64.powi(2),
        "g" | "gib" => 1024f64.powi(3),
        "t" | "tib" => 1024f64.powi(4),
        "kb" => 1e3,
        "mb" => 1e6,
        "gb" => 1e9,
        "tb" => 1e12,
        other => {
            return Err(text!(
                "unknown unit '{other}'; use K, M, G, T, KiB … or KB …",
                "未知的单位 '{other}'；可用 K、M、G、T、KiB……或 KB……"
            ));
        }
    };
    let bytes = number * scale;
    // Above 2^53 a byte count is no longer exact, and no machine has that much.
    if !(0.0..=9.0e15).contains(&bytes) {
        return Err(text!("'{text}' is out of range", "'{text}' 超出范围"));
    }
    Ok(bytes.round() as u64)
}

/// Short text of a byte count: at most four digits, and a letter for the power of 1024: `512`, `1.5K`, `21M`,
/// `2.6G`.
pub fn bytes(value: u64) -> String {
    scaled(value, 1024.0, &["", "K", "M", "G", "T", "P"])
}

/// Short text of a count: at most three digits, rounded, and a letter for the power of 1000: `96`, `1.3k`,
/// `8.1B`.
pub fn count(value: u64) -> String {
    scaled(value, 1000.0, &["", "k", "M", "B", "T", "Q"])
}

fn scaled(value: u64, base: f64, units: &[&str]) -> String {
    let mut number = value as f64;
    let mut unit = 0;
    // 999.95 would print as 1000.0, so the next unit starts where rounding would reach 1000.
    while number >= base - 0.5 && unit + 1 < units.len() {
        number /= base;
        unit += 1;
    }
    if unit == 0 || number >= 99.95 {
        format!("{number:.0}{}", units[unit])
    } else {
        format!("{number:.1}{}", units[unit])
    }
}

/// Text of an integer with spaces between groups of three digits: `10 000`.
pub fn grouped(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(' ');
        }
        text.push(digit);
    }
    text
}

/// Text of a duration in seconds as `h:mm:ss`, the way Hugging Face tools write times. It is rounded to whole
/// seconds; a negative duration counts as 0.
pub fn clock(seconds: f64) -> String {
    let total = seconds.max(0.0).round() as u64;
    format!("{}:{:02}:{:02}", total / 3600, total / 60 % 60, total % 60)
}

/// Text of a duration in seconds for people: `0.04 s`, `19.4 s`, `12 min 05 s`.
pub fn seconds(value: f64) -> String {
    if value < 0.995 {
        format!("{value:.2} s")
    } else if value < 99.95 {
        format!("{value:.1} s")
    } else {
        let total = value.round() as u64;
        format!("{} min {:02} s", total / 60, total % 60)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_parsed_in_every_spelling() {
        assert_eq!(parse_bytes("64G"), Ok(64 << 30));
        assert_eq!(parse_bytes("512MiB"), Ok(512 << 20));
        assert_eq!(parse_bytes("5e8"), Ok(500_000_000));
        assert_eq!(parse_bytes("1.5 GiB"), Ok(3 << 29));
        assert_eq!(parse_bytes("2GB"), Ok(2_000_000_000));
        assert_eq!(parse_bytes("17"), Ok(17));
        for bad in ["", "G", "5X", "-1", "1e40", "nan", "inf"] {
            assert!(parse_bytes(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn quantities_are_printed_short() {
        assert_eq!(bytes(512), "512");
        assert_eq!(bytes(1_300_000), "1.2M");
        assert_eq!(bytes(64 << 30), "64.0G");
        assert_eq!(bytes(182 << 20), "182M");
        assert_eq!(count(8_099_175_152), "8.1B");
        assert_eq!(count(999_999), "1.0M");
        assert_eq!(count(96), "96");
        assert_eq!(grouped(1_234_567), "1 234 567");
        assert_eq!(grouped(12), "12");
    }

    #[test]
    fn durations_are_printed_in_readable_units() {
        assert_eq!(clock(3723.4), "1:02:03");
        assert_eq!(seconds(0.041), "0.04 s");
        assert_eq!(seconds(19.44), "19.4 s");
        assert_eq!(seconds(725.0), "12 min 05 s");
    }
}
