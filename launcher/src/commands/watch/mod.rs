//! `launcher watch`: shows a run from the files in its directory, once or continuously, on the screen or as a page.
//!
//! It changes nothing in the run and talks to no process of it. So it works for other users of the machine, over a
//! network file system, and long after the run.

mod serve;
mod text;
mod view;

use crate::lang::{Both, Lang, both, text};
use std::fs;
use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use crate::cli::WatchArgs;
use crate::config::CONFIG_FILE;
use crate::error::{ErrorCode, Failure};
use crate::report::{RunFiles, TRAINER_LOG, run_directory};
use view::{Presence, View};

/// Interval between two readings of the files.
const INTERVAL: Duration = Duration::from_secs(1);
/// Escape sequence that clears a terminal and moves to its upper left corner.
const CLEAR: &str = "\x1b[2J\x1b[H";

/// Shows the run until it ends.
///
/// # Errors
/// When the directory is not that of a run (exit 2).
pub(crate) fn run(args: &WatchArgs) -> Result<ExitCode, Failure> {
    check(&args.run)?;
    if let Some(address) = &args.serve {
        return serve::run(&args.run, address);
    }
    let json = args.json == Some(true);
    let redraws = io::stdout().is_terminal() && !json && args.once != Some(true);
    let mut shown = None;
    loop {
        let view = look(&args.run);
        // On a terminal the view is redrawn anyway, because it counts the seconds since the last change.
        let changed = shown.as_ref().is_none_or(|shown| !view.same_news(shown));
        if (redraws || changed) && !print(&view, json, redraws)? {
            break;
        }
        if args.once == Some(true) || !view.state.goes_on() {
            break;
        }
        shown = Some(view);
        std::thread::sleep(INTERVAL);
    }
    Ok(ExitCode::SUCCESS)
}

fn check(directory: &Path) -> Result<(), Failure> {
    let refuse = |cause: Both| {
        Failure::usage(
            text!("cannot watch {}", "无法查看 {}", directory.display()),
            cause,
        )
        .next(both(
            "give the directory of a run: the value of its --output, or a directory below runs/",
            "请指定某次运行的目录：其 --output 的值，或 runs/ 下的目录",
        ))
    };
    if !directory.is_dir() {
        return Err(refuse(both("the directory does not exist", "该目录不存在")));
    }
    let is_run = [CONFIG_FILE, TRAINER_LOG]
        .iter()
        .any(|name| directory.join(name).is_file());
    if is_run {
        Ok(())
    } else {
        Err(
            refuse(both("it contains no run", "其中没有运行")).evidence(text!(
                "it has neither {CONFIG_FILE} nor {TRAINER_LOG}",
                "其中既没有 {CONFIG_FILE}，也没有 {TRAINER_LOG}"
            )),
        )
    }
}

fn look(directory: &Path) -> View {
    let names = [
        CONFIG_FILE,
        TRAINER_LOG,
        "memory.jsonl",
        "trainer_state.json",
        "errors",
    ];
    let changes = names.iter().filter_map(|name| {
        fs::metadata(directory.join(name))
            .and_then(|file| file.modified())
            .ok()
    });
    let news = changes.max().unwrap_or(SystemTime::UNIX_EPOCH);
    let age = SystemTime::now().duration_since(news).unwrap_or_default();
    let presence = Presence {
        is_held: run_directory::is_held(directory),
        seconds_since_news: age.as_secs_f64(),
    };
    View::new(&RunFiles::read(directory), presence)
}

/// Writes a view. Returns false if the output is closed.
fn print(view: &View, json: bool, redraws: bool) -> Result<bool, Failure> {
    let fail = |error: &io::Error| {
        Failure::io(
            ErrorCode::Disk,
            both("write", "写入"),
            Path::new("standard output"),
            error,
        )
    };
    let text = if json {
        serde_json::to_string(view).map_err(|error| fail(&error.into()))? + "\n"
    } else {
        Lang::chosen().speak(|| text::render(view))
    };
    let clear = if redraws { CLEAR } else { "" };
    let mut out = io::stdout().lock();
    match write!(out, "{clear}{text}").and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(fail(&error)),
    }
}
