//! Line numbers of samples in a data file.

/// Lines, counted from 1, on which the samples of `text` begin. Samples are the elements of a JSON list, or the lines
/// that are not blank. `text` must be valid, since it was parsed before.
pub fn sample_lines(text: &[u8]) -> Vec<usize> {
    let text = text.strip_prefix(b"\xef\xbb\xbf").unwrap_or(text);
    if text.trim_ascii_start().first() == Some(&b'[') {
        return of_elements(text);
    }
    let lines = text.split(|byte| *byte == b'\n').enumerate();
    lines
        .filter(|(_, line)| !line.trim_ascii().is_empty())
        .map(|(index, _)| index + 1)
        .collect()
}

/// Lines of the objects directly inside the outermost list.
fn of_elements(text: &[u8]) -> Vec<usize> {
    let mut found = Vec::new();
    let (mut line, mut depth) = (1, 0usize);
    let (mut in_text, mut escaped) = (false, false);
    for byte in text {
        if *byte == b'\n' {
            line += 1;
        }
        if in_text {
            match byte {
                _ if escaped => escaped = false,
                b'\\' => escaped = true,
                b'"' => in_text = false,
                _ => {}
            }
            continue;
        }
        match byte {
            b'"' => in_text = true,
            b'[' | b'{' => {
                if depth == 1 {
                    found.push(line);
                }
                depth += 1;
            }
            b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_list_elements_are_those_of_their_braces() {
        let text = "[{\"a\": [1, {\"b\": 2}]},\n {\"c\": \"]{[ \\\" {\"},\n\n\n {\"d\": 1}\n]";
        assert_eq!(sample_lines(text.as_bytes()), [1, 2, 5]);
        assert_eq!(sample_lines(b"\xef\xbb\xbf [\n{}]"), [2]);
    }

    #[test]
    fn one_object_per_line_counts_blank_lines() {
        assert_eq!(sample_lines(b"\n{}\n\n{}\n{}\n"), [2, 4, 5]);
    }
}
