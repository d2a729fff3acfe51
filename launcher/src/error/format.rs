//! Printing of a failure: as a block for people, or as one line of JSON for programs.

use std::io::Write;

use clap::ValueEnum;
use serde::Serialize;

use crate::error::Failure;
use crate::lang::Lang;

/// Name of the flag in snake_case; every subcommand takes it.
pub(crate) const FLAG: &str = "error_format";

/// `--error-format`: format in which a failure is printed on standard error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum ErrorFormat {
    /// The block of title, cause, evidence and next steps.
    #[default]
    Human,
    /// One JSON object on the last line.
    Json,
}

/// A failure as JSON: the fields of `errors/rank-0000.json`, and the exit code.
#[derive(Serialize)]
struct Printed<'a> {
    #[serde(flatten)]
    failure: &'a Failure,
    status: u8,
}

impl ErrorFormat {
    /// Value of `--error-format` on a command line, even if the line has other mistakes. The default if the
    /// flag is missing or its value is invalid.
    pub fn of_line(argv: &[String]) -> Self {
        last_value(argv, FLAG, Self::named).unwrap_or_default()
    }

    /// The format whose command-line value is `name` (`human` or `json`, in any case). `None` for any other name.
    pub(crate) fn named(name: &str) -> Option<Self> {
        Self::from_str(name, true).ok()
    }

    /// Text of a failure in this format, without the final line break.
    pub fn render(self, failure: &Failure) -> String {
        let status = failure.code.status();
        let json = match self {
            Self::Human => None,
            Self::Json => serde_json::to_string(&Printed { failure, status }).ok(),
        };
        json.unwrap_or_else(|| Lang::chosen().speak(|| failure.to_string()))
    }

    /// Prints a failure on standard error in this format. Write errors are ignored.
    pub fn print(self, failure: &Failure) {
        // If standard error is closed, nobody can be told.
        drop(writeln!(std::io::stderr(), "{}", self.render(failure)));
    }
}

/// The last value of the flag `name` (in snake_case) on a command line that `read` accepts, even if the line has other
/// mistakes.
pub(crate) fn last_value<T>(
    argv: &[String],
    flag: &str,
    read: impl Fn(&str) -> Option<T>,
) -> Option<T> {
    let mut asked = None;
    let mut words = argv.iter().peekable();
    while let Some(word) = words.next() {
        let Some(body) = word.strip_prefix("--") else {
            continue;
        };
        let (name, inline) = match body.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (body, None),
        };
        if name.replace('-', "_") == flag {
            let value = inline.or_else(|| words.peek().map(|word| word.as_str()));
            asked = value.and_then(&read).or(asked);
        }
    }
    asked
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorCode;

    fn of(line: &str) -> ErrorFormat {
        let argv: Vec<String> = line.split_whitespace().map(str::to_string).collect();
        ErrorFormat::of_line(&argv)
    }

    #[test]
    fn the_error_format_is_found_on_command_lines_that_do_not_parse() {
        assert_eq!(of("--zeor 3"), ErrorFormat::Human);
        assert_eq!(of("--zeor 3 --error-format json"), ErrorFormat::Json);
        assert_eq!(of("doctor --error_format=JSON --bogus"), ErrorFormat::Json);
        assert_eq!(of("--error-format"), ErrorFormat::Human);
        assert_eq!(of("--error-format xml"), ErrorFormat::Human);
    }

    #[test]
    fn json_is_one_line_with_the_stored_fields_and_the_status() {
        let failure = Failure::new(ErrorCode::Numeric, "loss is NaN", "two\nlines").next("n");
        let text = ErrorFormat::Json.render(&failure);
        assert!(!text.contains('\n'));
        let mut printed: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(printed["status"], 15);
        printed.as_object_mut().expect("an object").remove("status");
        assert_eq!(printed, serde_json::to_value(&failure).expect("serialises"));
    }
}
