//! Parser of Slurm's short forms: lists of hosts such as `gpu[01-04,07],b1`, and lists of counts such as `2(x3),1`.

use std::fmt;

/// Maximum number of hosts in one of Slurm's host lists. A job has at most [`engine::comm::MAX_RANKS`] ranks,
/// but a list may name a whole cluster.
pub const MAX_HOSTS: usize = 65_536;
/// Maximal length of a host name, as in the domain name system.
const MAX_NAME_BYTES: usize = 255;
/// Maximal number of bracketed parts in a name, as in `rack[1-4]node[01-16]`.
const MAX_BRACKETS: usize = 4;

/// Reason why one of Slurm's lists of hosts or counts cannot be parsed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ListError {
    /// Syntax error at a byte of the text.
    Syntax {
        /// Offset in the text, in bytes.
        at: usize,
        /// What is expected at this offset.
        needed: &'static str,
    },
    /// The list has more than [`MAX_HOSTS`] entries.
    TooLong,
}

impl fmt::Display for ListError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Syntax { at, needed } => write!(f, "at byte {}: {needed}", at + 1),
            Self::TooLong => write!(f, "more than {MAX_HOSTS} entries"),
        }
    }
}

impl std::error::Error for ListError {}

/// Host names of one of Slurm's host lists, in order: `gpu[01-02],b1` gives gpu01, gpu02, b1.
///
/// # Errors
/// The text is not a list of hosts, or has more than [`MAX_HOSTS`].
pub fn expand(text: &str) -> Result<Vec<String>, ListError> {
    let mut reader = Reader { text, at: 0 };
    let mut hosts = Vec::new();
    loop {
        reader.host(&mut hosts)?;
        if reader.at == text.len() {
            return Ok(hosts);
        }
        reader.take(b',', "a comma between hosts")?;
    }
}

/// Count at position `index` (from 0) of one of Slurm's lists of counts: `2(x3),1` stands for 2, 2, 2, 1.
/// `None` if the list is shorter.
///
/// # Errors
/// The text is not a list of counts.
pub fn count_at(text: &str, index: usize) -> Result<Option<usize>, ListError> {
    let mut reader = Reader { text, at: 0 };
    let mut seen = 0usize;
    let mut found = None;
    loop {
        let count = reader.number()?;
        let mut times = 1;
        if reader.peek() == Some(b'(') {
            reader.at += 1;
            reader.take(b'x', "x and a number of hosts")?;
            times = reader.number()?;
            reader.take(b')', "a closing parenthesis")?;
        }
        let end = seen.saturating_add(times);
        if found.is_none() && (seen..end).contains(&index) {
            found = Some(count);
        }
        seen = end;
        if reader.at == text.len() {
            return Ok(found);
        }
        reader.take(b',', "a comma between counts")?;
    }
}

struct Reader<'a> {
    text: &'a str,
    at: usize,
}

impl Reader<'_> {
    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn error(&self, needed: &'static str) -> ListError {
        ListError::Syntax {
            at: self.at,
            needed,
        }
    }

    fn take(&mut self, byte: u8, needed: &'static str) -> Result<(), ListError> {
        if self.peek() != Some(byte) {
            return Err(self.error(needed));
        }
        self.at += 1;
        Ok(())
    }

    /// Parses one name with its brackets, and adds every combination to `hosts`.
    fn host(&mut self, hosts: &mut Vec<String>) -> Result<(), ListError> {
        let begin = self.at;
        let mut names = vec![String::new()];
        let mut brackets = 0;
        loop {
            match self.peek() {
                None | Some(b',') => break,
                Some(b'[') => {
                    brackets += 1;
                    if brackets > MAX_BRACKETS {
                        return Err(self.error("fewer brackets in one name"));
                    }
                    self.at += 1;
                    let suffixes = self.ranges()?;
                    if names.len().saturating_mul(suffixes.len()) > MAX_HOSTS {
                        return Err(ListError::TooLong);
                    }
                    let combine = |name: &String| -> Vec<String> {
                        let joined = suffixes.iter().map(|suffix| format!("{name}{suffix}"));
                        joined.collect()
                    };
                    names = names.iter().flat_map(combine).collect();
                }
                Some(byte) if byte.is_ascii_alphanumeric() || b"-_.:".contains(&byte) => {
                    for name in &mut names {
                        name.push(char::from(byte));
                    }
                    self.at += 1;
                    if self.at - begin > MAX_NAME_BYTES {
                        return Err(self.error("a shorter name"));
                    }
                }
                Some(_) => return Err(self.error("a letter, a digit or one of - _ . of a name")),
            }
        }
        if self.at == begin {
            return Err(self.error("the name of a host"));
        }
        if hosts.len() + names.len() > MAX_HOSTS {
            return Err(ListError::TooLong);
        }
        hosts.append(&mut names);
        Ok(())
    }

    /// Parses `01-04,07]`, the text after an opening bracket.
    fn ranges(&mut self) -> Result<Vec<String>, ListError> {
        let mut found = Vec::new();
        loop {
            let begin = self.at;
            let first = self.number()?;
            let width = self.at - begin;
            let mut last = first;
            if self.peek() == Some(b'-') {
                self.at += 1;
                last = self.number()?;
                if last < first {
                    return Err(self.error("a range that rises"));
                }
            }
            if (last - first).saturating_add(found.len()) >= MAX_HOSTS {
                return Err(ListError::TooLong);
            }
            found.extend((first..=last).map(|number| format!("{number:0width$}")));
            match self.peek() {
                Some(b',') => self.at += 1,
                Some(b']') => {
                    self.at += 1;
                    return Ok(found);
                }
                _ => return Err(self.error("a comma or a closing bracket")),
            }
        }
    }

    /// Parses a number of at most nine digits.
    fn number(&mut self) -> Result<usize, ListError> {
        let rest = &self.text.as_bytes()[self.at..];
        let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
        if !(1..=9).contains(&digits) {
            return Err(self.error("a number of one to nine digits"));
        }
        let number = rest[..digits]
            .iter()
            .fold(0, |sum, byte| sum * 10 + usize::from(byte - b'0'));
        self.at += digits;
        Ok(number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn host_lists_are_expanded() {
        for (text, hosts) in [
            ("n1", "n1"),
            ("gpu[01-04,07],b1", "gpu01 gpu02 gpu03 gpu04 gpu07 b1"),
            ("a[8-11]", "a8 a9 a10 a11"),
            ("r[1-2]n[01-02]", "r1n01 r1n02 r2n01 r2n02"),
            ("node[3]-ib.cluster", "node3-ib.cluster"),
            ("a,b-2,c_3", "a b-2 c_3"),
        ] {
            let hosts: Vec<&str> = hosts.split(' ').collect();
            assert_eq!(expand(text).expect(text), hosts, "{text}");
        }
    }

    #[test]
    fn errors_name_their_position() {
        for (text, at) in [
            ("", 0),
            ("a,", 2),
            ("a,,b", 2),
            ("a[", 2),
            ("a[]", 2),
            ("a[1", 3),
            ("a[2-1]", 5),
            ("a[1-]", 4),
            ("a]", 1),
            ("a b", 1),
            ("ä", 0),
            ("a[0000000001]", 2),
        ] {
            let error = expand(text).expect_err(text);
            assert!(
                matches!(error, ListError::Syntax { at: found, .. } if found == at),
                "{text}: {error:?}"
            );
        }
        assert_eq!(expand("a[0-999999999]"), Err(ListError::TooLong));
        assert_eq!(expand("a[0-999]b[0-999]"), Err(ListError::TooLong));
    }

    #[test]
    fn repeated_counts_are_found_by_index() {
        let at = |index| count_at("2(x3),1,4(x1)", index).expect("a list");
        let found: Vec<_> = (0..6).map(at).collect();
        assert_eq!(found, [Some(2), Some(2), Some(2), Some(1), Some(4), None]);
        for text in ["", "2(", "2(x", "2(x3", "2(3)", "2,", "x"] {
            count_at(text, 0).expect_err(text);
        }
    }

    /// What the list `names` of plain names means, and how Slurm would shorten it.
    fn shortened(prefix: &str, first: usize, count: usize, width: usize) -> (String, Vec<String>) {
        let last = first + count - 1;
        let names = (first..=last)
            .map(|number| format!("{prefix}{number:0width$}"))
            .collect();
        (format!("{prefix}[{first:0width$}-{last}]"), names)
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused_within_bounds(text in r"[a-c0-9\[\],\-( )xé]{0,40}") {
            if let Ok(hosts) = expand(&text) {
                prop_assert!((1..=MAX_HOSTS).contains(&hosts.len()));
                prop_assert!(hosts.iter().all(|host| !host.is_empty() && host.len() <= MAX_NAME_BYTES + 36));
            }
            count_at(&text, 3).ok();
        }

        #[test]
        fn ranges_keep_their_leading_zeros(
            prefix in "[a-z]{1,5}", first in 0usize..2000, count in 1usize..50, width in 1usize..7,
        ) {
            let (text, names) = shortened(&prefix, first, count, width);
            prop_assert_eq!(expand(&text), Ok(names));
        }
    }
}
