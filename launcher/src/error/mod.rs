//! Failures: error codes, exit codes of the process, and the printed block.
//!
//! A failure says what happened, why, on which evidence, and what to do next. A rank writes its failure to
//! `errors/rank-0000.json`. The supervisor prints exactly one: that of the first rank that failed.

mod causes;
mod commands;
pub(crate) mod failures;
pub mod format;
mod model_files;
pub(crate) mod output;
pub(crate) mod pages;
pub(crate) mod parts;
mod system;
pub(crate) mod threads;
mod weight_files;

use std::error::Error;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use serde::{Deserialize, Serialize};

use crate::lang::{Both, Lang, Text, both, text};

pub(crate) use commands::{continue_run, quoted};
pub(crate) use model_files::hub_name;

/// Target of the log record that a failing rank ends with.
pub(crate) const RECORD_TARGET: &str = "tessera_report";

/// Stable code of a kind of failure, `E01` to `E22`. Each code has one exit status of the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ErrorCode {
    /// A device cannot hold the run.
    #[serde(rename = "E01")]
    DeviceMemory,
    /// Host memory ran out, or the operating system killed a rank.
    #[serde(rename = "E02")]
    HostMemory,
    /// The ranks could not join a rendezvous.
    #[serde(rename = "E03")]
    Rendezvous,
    /// A collective timed out, or the ranks disagree.
    #[serde(rename = "E04")]
    Collective,
    /// A loss, gradient or weight is not finite.
    #[serde(rename = "E05")]
    Numeric,
    /// Samples cannot be used for training: no supervised token, too long.
    #[serde(rename = "E06")]
    Samples,
    /// Placeholders and images of a sample disagree.
    #[serde(rename = "E07")]
    Placeholders,
    /// A checkpoint does not fit the run, or is damaged.
    #[serde(rename = "E08")]
    Resume,
    /// Flags or configuration: unknown, contradicting, out of range, not available.
    #[serde(rename = "E09")]
    Usage,
    /// A model directory is incomplete, damaged or of an unsupported family.
    #[serde(rename = "E10")]
    ModelFiles,
    /// A GPU is too old for the requested operation.
    #[serde(rename = "E11")]
    DeviceTooOld,
    /// CUDA cannot be used: no driver or an old one, no GPU, or a GPU that fails.
    #[serde(rename = "E12")]
    Cuda,
    /// The disk is full or a file cannot be written.
    #[serde(rename = "E13")]
    Disk,
    /// The port of the rendezvous is in use.
    #[serde(rename = "E14")]
    PortInUse,
    /// Shared memory is too small for the exchange between ranks.
    #[serde(rename = "E15")]
    SharedMemory,
    /// A resumed run has nothing left to do.
    #[serde(rename = "E16")]
    NothingToDo,
    /// The plan needs more memory than is available.
    #[serde(rename = "E17")]
    Plan,
    /// A data file or an image cannot be read.
    #[serde(rename = "E18")]
    DataFile,
    /// A rank panicked: a bug of this program.
    #[serde(rename = "E19")]
    Panic,
    /// A rank ended unexpectedly: a signal, or an unknown exit code.
    #[serde(rename = "E20")]
    RankDied,
    /// Stopped by a signal. The state was saved if possible.
    #[serde(rename = "E21")]
    Interrupted,
    /// A GPU does not compute what the CPU computes.
    #[serde(rename = "E22")]
    GpuVerification,
}

impl ErrorCode {
    /// Every error code, from `E01` to `E22`.
    pub const ALL: [Self; 22] = [
        Self::DeviceMemory,
        Self::HostMemory,
        Self::Rendezvous,
        Self::Collective,
        Self::Numeric,
        Self::Samples,
        Self::Placeholders,
        Self::Resume,
        Self::Usage,
        Self::ModelFiles,
        Self::DeviceTooOld,
        Self::Cuda,
        Self::Disk,
        Self::PortInUse,
        Self::SharedMemory,
        Self::NothingToDo,
        Self::Plan,
        Self::DataFile,
        Self::Panic,
        Self::RankDied,
        Self::Interrupted,
        Self::GpuVerification,
    ];

    /// The code as printed, such as `"E01"`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::DeviceMemory => "E01",
            Self::HostMemory => "E02",
            Self::Rendezvous => "E03",
            Self::Collective => "E04",
            Self::Numeric => "E05",
            Self::Samples => "E06",
            Self::Placeholders => "E07",
            Self::Resume => "E08",
            Self::Usage => "E09",
            Self::ModelFiles => "E10",
            Self::DeviceTooOld => "E11",
            Self::Cuda => "E12",
            Self::Disk => "E13",
            Self::PortInUse => "E14",
            Self::SharedMemory => "E15",
            Self::NothingToDo => "E16",
            Self::Plan => "E17",
            Self::DataFile => "E18",
            Self::Panic => "E19",
            Self::RankDied => "E20",
            Self::Interrupted => "E21",
            Self::GpuVerification => "E22",
        }
    }

    /// Exit status that the process ends with after this error.
    pub const fn status(self) -> u8 {
        match self {
            Self::Usage => 2,
            Self::Samples | Self::Placeholders | Self::DataFile => 3,
            Self::Plan => 5,
            Self::Resume | Self::NothingToDo => 9,
            Self::ModelFiles => 10,
            Self::DeviceMemory => 11,
            Self::HostMemory => 12,
            Self::Rendezvous
            | Self::PortInUse
            | Self::SharedMemory
            | Self::DeviceTooOld
            | Self::Cuda
            | Self::GpuVerification => 13,
            Self::Collective => 14,
            Self::Numeric => 15,
            Self::Disk => 16,
            Self::Panic | Self::RankDied => 101,
            Self::Interrupted => 130,
        }
    }

    /// Most likely error code for the exit status of a rank that stored no failure. `None` for an unknown
    /// status.
    pub fn from_status(status: i32) -> Option<Self> {
        Some(match status {
            2 => Self::Usage,
            3 => Self::DataFile,
            5 => Self::Plan,
            9 => Self::Resume,
            10 => Self::ModelFiles,
            11 => Self::DeviceMemory,
            12 => Self::HostMemory,
            13 => Self::Rendezvous,
            14 => Self::Collective,
            15 => Self::Numeric,
            16 => Self::Disk,
            101 => Self::Panic,
            130 => Self::Interrupted,
            _ => return None,
        })
    }

    /// Whether this failure usually follows from that of another rank: if a rank dies, its peers see a broken
    /// collective.
    pub const fn is_consequence(self) -> bool {
        matches!(
            self,
            Self::Collective | Self::Rendezvous | Self::Interrupted
        )
    }
}

impl fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A failure of a run or a command, as printed to the user and as stored in `errors/`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// Kind of the failure. It determines the exit status.
    pub code: ErrorCode,
    /// What happened, in one line.
    pub title: Text,
    /// Why it happened.
    pub cause: Text,
    /// Facts that were observed, one line each.
    pub evidence: Vec<Text>,
    /// What the user can do next, one line each.
    pub next: Vec<Text>,
    /// File with more details about the failure, if any, such as `errors/rank-0001.json`.
    pub details: Option<Box<Path>>,
}

impl Failure {
    /// A failure with a code, a title (what happened) and a cause (why), without evidence and next steps.
    pub fn new(code: ErrorCode, title: impl Into<Text>, cause: impl Into<Text>) -> Self {
        Self {
            code,
            title: title.into(),
            cause: cause.into(),
            evidence: Vec::new(),
            next: Vec::new(),
            details: None,
        }
    }

    /// A failure because of wrong arguments or settings ([`ErrorCode::Usage`], exit 2).
    pub fn usage(title: impl Into<Text>, cause: impl Into<Text>) -> Self {
        Self::new(ErrorCode::Usage, title, cause)
    }

    /// Failure of a file operation on `path`, with `error` as its cause. `doing` is the operation in
    /// the title, such as `write`. A full disk gets the code [`ErrorCode::Disk`]; any other error gets `code`.
    pub fn io(code: ErrorCode, doing: Both, path: &Path, error: &io::Error) -> Self {
        let full = matches!(
            error.kind(),
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
        );
        let failure = Self::new(
            if full { ErrorCode::Disk } else { code },
            text!("cannot {doing} {}", "无法{doing} {}", path.display()),
            chain(error),
        );
        if let Some(remedy) = system::remedy(error) {
            return failure.next(remedy);
        }
        match failure.code {
            ErrorCode::Disk if full => failure.next(both(
                "free space on that disk, or choose another directory with --output",
                "请清理该磁盘的空间，或用 --output 指定其他目录",
            )),
            ErrorCode::Disk => failure.next(both(
                "make that path writable, or choose another directory with --output",
                "请使该路径可写，或用 --output 指定其他目录",
            )),
            _ => failure,
        }
    }

    /// Title and cause in one line.
    pub(crate) fn summary(&self) -> Text {
        text!("{}: {}", "{}：{}", self.title, self.cause)
    }

    /// Adds one line of evidence, a fact that was observed.
    #[must_use]
    pub fn evidence(mut self, line: impl Into<Text>) -> Self {
        self.evidence.push(line.into());
        self
    }

    /// Adds one line with a next step for the user.
    #[must_use]
    pub fn next(mut self, line: impl Into<Text>) -> Self {
        self.next.push(line.into());
        self
    }

    /// Adds several lines of evidence, facts that were observed.
    #[must_use]
    pub fn evidence_lines<T: Into<Text>>(mut self, lines: impl IntoIterator<Item = T>) -> Self {
        self.evidence.extend(lines.into_iter().map(Into::into));
        self
    }

    /// Sets the file that has more details about the failure.
    #[must_use]
    pub fn details(mut self, path: impl Into<PathBuf>) -> Self {
        self.details = Some(path.into().into_boxed_path());
        self
    }

    /// Exit code of a process that ends with this failure.
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(self.code.status())
    }

    /// Path of the file in which rank `rank` stores its failure, inside the run directory `output`.
    pub fn path(output: &Path, rank: usize) -> PathBuf {
        output.join("errors").join(format!("rank-{rank:04}.json"))
    }

    /// Writes this failure as JSON to [`Failure::path`], as that of rank `rank` of the run in `output`.
    ///
    /// # Errors
    /// The directory or the file cannot be written.
    pub fn save(&self, output: &Path, rank: usize) -> io::Result<()> {
        let path = Self::path(output, rank);
        if let Some(directory) = path.parent() {
            std::fs::create_dir_all(directory)?;
        }
        std::fs::write(path, serde_json::to_vec_pretty(&Stored::of(self))?)
    }

    /// Reads the failure that rank `rank` stored in the run directory `output`. `None` if it is missing or
    /// unreadable.
    pub fn load(output: &Path, rank: usize) -> Option<Self> {
        let bytes = std::fs::read(Self::path(output, rank)).ok()?;
        let stored: Stored = serde_json::from_slice(&bytes).ok()?;
        Some(stored.into_failure())
    }
}

/// A failure as it is stored. Programs read the English fields; `zh` carries the Chinese ones from a rank to the
/// supervisor.
#[derive(Serialize, Deserialize)]
struct Stored {
    code: ErrorCode,
    #[serde(flatten)]
    english: Wording,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    details: Option<Box<Path>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    zh: Option<Wording>,
}

/// A text that was stored; in English only if the file has no translation.
fn text_of(en: String, zh: Option<String>) -> Text {
    match zh.filter(|zh| !zh.is_empty()) {
        Some(zh) => Text::new(en, zh),
        None => Text::literal(en),
    }
}

/// The texts of a failure in one language.
#[derive(Default, Serialize, Deserialize)]
struct Wording {
    title: String,
    cause: String,
    evidence: Vec<String>,
    next: Vec<String>,
}

impl Wording {
    fn of(failure: &Failure, lang: Lang) -> Self {
        let lines = |texts: &[Text]| texts.iter().map(|text| text.get(lang).to_owned()).collect();
        Self {
            title: failure.title.get(lang).to_owned(),
            cause: failure.cause.get(lang).to_owned(),
            evidence: lines(&failure.evidence),
            next: lines(&failure.next),
        }
    }
}

/// In English, as programs read it.
impl Serialize for Failure {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        Stored::english(self).serialize(to)
    }
}

impl Stored {
    fn english(failure: &Failure) -> Self {
        Self {
            code: failure.code,
            english: Wording::of(failure, Lang::En),
            details: failure.details.clone(),
            zh: None,
        }
    }

    fn of(failure: &Failure) -> Self {
        Self {
            zh: Some(Wording::of(failure, Lang::Zh)),
            ..Self::english(failure)
        }
    }

    fn into_failure(self) -> Failure {
        let Wording {
            title,
            cause,
            evidence,
            next,
        } = self.english;
        let zh = self.zh.unwrap_or_default();
        let texts = |en: Vec<String>, zh: Vec<String>| {
            let mut zh = zh.into_iter();
            let translated = en.into_iter().map(|line| text_of(line, zh.next()));
            translated.collect()
        };
        Failure {
            code: self.code,
            title: text_of(title, Some(zh.title)),
            cause: text_of(cause, Some(zh.cause)),
            evidence: texts(evidence, zh.evidence),
            next: texts(next, zh.next),
            details: self.details,
        }
    }
}

/// Labels of a printed failure.
const LABELS: [Both; 6] = [
    both("error", "错误"),
    both("cause", "原因"),
    both("evidence", "依据"),
    both("next", "下一步"),
    both("exit", "退出码"),
    both("details", "详情"),
];

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [error, cause, evidence, next, exit, details] = LABELS;
        writeln!(f, "{error}[{}] {}", self.code, self.title)?;
        write_part(f, cause, std::slice::from_ref(&self.cause))?;
        write_part(f, evidence, &self.evidence)?;
        write_part(f, next, &self.next)?;
        write!(f, "  {exit} {}", self.code.status())?;
        if let Some(path) = &self.details {
            write!(f, "    {details}: {}", path.display())?;
        }
        Ok(())
    }
}

impl Error for Failure {}

fn write_part(f: &mut fmt::Formatter<'_>, label: Both, lines: &[Text]) -> fmt::Result {
    for (index, line) in lines.iter().enumerate() {
        let label = if index == 0 { label } else { both("", "") };
        writeln!(f, "  {label:<9} {}", indent(&line.to_string()))?;
    }
    Ok(())
}

/// Indents continuation lines under the first line.
fn indent(text: &str) -> String {
    text.trim_end().replace('\n', "\n            ")
}

/// An error and its sources, in one line.
pub(crate) fn chain(error: &(dyn Error + 'static)) -> Text {
    let english = |error: &(dyn Error + 'static)| error.to_string();
    let chinese =
        |error: &(dyn Error + 'static)| causes::chinese(error).unwrap_or_else(|| error.to_string());
    Text::new(
        chained(error, &english, ": "),
        chained(error, &chinese, "："),
    )
}

/// The words of an error and its sources, as far as they add something.
fn chained(
    error: &(dyn Error + 'static),
    words: &dyn Fn(&(dyn Error + 'static)) -> String,
    separator: &str,
) -> String {
    let mut text = words(error);
    let mut source = error.source();
    while let Some(inner) = source {
        let inner_text = words(inner);
        if !text.contains(&inner_text) {
            text.push_str(separator);
            text.push_str(&inner_text);
        }
        source = inner.source();
    }
    text
}

/// Last component of a path, for messages.
pub(crate) fn file_name(path: &Path) -> String {
    path.file_name()
        .map_or_else(String::new, |name| name.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_printed_failure_has_four_parts_and_the_exit_status() {
        let failure = Failure::new(ErrorCode::HostMemory, "rank 1 was killed", "memory ran out")
            .evidence("oom_kill +1")
            .evidence("limit 62 GiB")
            .next("--offload none")
            .details("errors/rank-0001.json");
        assert_eq!(
            failure.to_string(),
            "error[E02] rank 1 was killed\n  cause     memory ran out\n  evidence  oom_kill +1\n            limit 62 GiB\n  next      --offload none\n  exit 12    details: errors/rank-0001.json"
        );
    }

    #[test]
    fn codes_are_distinct_and_statuses_map_back() {
        for (index, code) in ErrorCode::ALL.iter().enumerate() {
            for other in &ErrorCode::ALL[index + 1..] {
                assert_ne!(code.as_str(), other.as_str());
            }
            let back = ErrorCode::from_status(i32::from(code.status())).expect("known status");
            assert_eq!(back.status(), code.status());
            assert_eq!(
                serde_json::to_string(code).expect("serialises"),
                format!("\"{code}\"")
            );
        }
        assert_eq!(ErrorCode::from_status(77), None);
    }

    #[test]
    fn a_saved_failure_loads_unchanged() {
        let directory = tempfile::tempdir().expect("temp dir");
        let failure = Failure::usage("t", "c").evidence("e").next("n");
        failure.save(directory.path(), 3).expect("saved");
        assert_eq!(Failure::load(directory.path(), 3), Some(failure));
        assert_eq!(Failure::load(directory.path(), 4), None);
    }

    #[test]
    fn a_full_disk_keeps_its_own_code() {
        let full = io::Error::from(io::ErrorKind::StorageFull);
        let failure = Failure::io(
            ErrorCode::ModelFiles,
            both("write", "写入"),
            Path::new("x"),
            &full,
        );
        assert_eq!(failure.code, ErrorCode::Disk);
        let missing = io::Error::from(io::ErrorKind::NotFound);
        let failure = Failure::io(
            ErrorCode::ModelFiles,
            both("read", "读取"),
            Path::new("x"),
            &missing,
        );
        assert_eq!(failure.code, ErrorCode::ModelFiles);
    }
}
