//! What a run shows: typed events, rendered to lines of text or a live progress bar.
//!
//! Rank 0 emits events. Under our supervisor they travel as JSON lines over the rank's standard
//! output, so that the process that owns the terminal draws; under another launcher rank 0 draws
//! itself.

mod event;
mod screen;
mod text;

use std::io::Write;
use std::sync::Mutex;

pub use event::{
    DataEvent, DoneEvent, EvalEvent, Event, PlanEvent, PlanPart, ResumeEvent, SaveEvent, StepEvent,
    TrainRow,
};
pub use screen::Screen;
pub use text::lines;

use crate::rank_env::RankEnv;

/// Starts an event on a rank's standard output: ASCII record separator.
const EVENT_MARK: char = '\u{1e}';

/// Where a rank sends its events.
#[derive(Debug)]
pub struct Reporter {
    sink: Sink,
}

#[derive(Debug)]
enum Sink {
    Silent,
    Supervisor,
    Screen(Mutex<Screen>),
}

impl Reporter {
    /// The reporter of one rank; ranks above 0 stay silent.
    pub fn for_rank(rank: &RankEnv) -> Self {
        let sink = match (rank.rank, rank.is_supervised()) {
            (0, true) => Sink::Supervisor,
            (0, false) => Sink::Screen(Mutex::new(Screen::on_stderr(rank.no_color))),
            _ => Sink::Silent,
        };
        Self { sink }
    }

    /// A reporter that shows nothing.
    pub const fn silent() -> Self {
        Self { sink: Sink::Silent }
    }

    /// Shows an event. A closed pipe is no error: the supervisor is gone and ends this rank.
    pub fn emit(&self, event: &Event) {
        match &self.sink {
            Sink::Silent => {}
            Sink::Supervisor => {
                if let Ok(line) = encode(event) {
                    let mut out = std::io::stdout().lock();
                    // The watcher of the parent ends this process when the pipe is gone.
                    drop(out.write_all(line.as_bytes()).and_then(|()| out.flush()));
                }
            }
            Sink::Screen(screen) => {
                if let Ok(mut screen) = screen.lock() {
                    screen.show(event);
                }
            }
        }
    }
}

fn encode(event: &Event) -> serde_json::Result<String> {
    Ok(format!("{EVENT_MARK}{}\n", serde_json::to_string(event)?))
}

/// Reads a line of a rank's standard output, if it is an event.
pub fn decode(line: &str) -> Option<Event> {
    serde_json::from_str(line.strip_prefix(EVENT_MARK)?.trim_end()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_survive_the_pipe() {
        let event = Event::Tick {
            step: 3,
            total: 10,
            loss: Some(1.25),
        };
        assert_eq!(decode(&encode(&event).expect("encodes")), Some(event));
        assert_eq!(decode("plain text"), None);
        assert_eq!(decode("\u{1e}{broken"), None);
    }
}
