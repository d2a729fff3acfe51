//! Output of a run: typed events, rendered as lines of text or a live progress bar.
//!
//! Rank 0 emits events. Under this program's supervisor it sends them as JSON lines over its standard output, so the
//! process that owns the terminal draws them. Under another launcher rank 0 draws them itself.

mod event;
mod screen;
mod text;

use std::io::Write;
use std::sync::Mutex;

pub use event::{
    DataEvent, DiskTraffic, DoneEvent, EvalEvent, Event, PlanEvent, PlanPart, QuantizedEvent,
    ResumeEvent, SaveEvent, StagesEvent, StepEvent, TrainRow,
};
pub use screen::Screen;
pub use text::lines;

use crate::rank_env::RankEnv;

/// First character of an event on a rank's standard output: the ASCII record separator.
const EVENT_MARK: char = '\u{1e}';

/// Destination of a rank's events: the supervisor, the screen, or nowhere.
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
    /// Reporter of one rank. Rank 0 sends events to the supervisor, or shows them itself under another
    /// launcher. Ranks above 0 discard them.
    pub fn for_rank(rank: &RankEnv) -> Self {
        let sink = match (rank.rank, rank.is_supervised()) {
            (0, true) => Sink::Supervisor,
            (0, false) => Sink::Screen(Mutex::new(Screen::on_stderr(rank.no_color))),
            _ => Sink::Silent,
        };
        Self { sink }
    }

    /// Reporter that discards all events.
    pub const fn silent() -> Self {
        Self { sink: Sink::Silent }
    }

    /// Shows an event, or sends it to the supervisor. Write errors are ignored: a closed pipe means that the
    /// supervisor is gone, which ends this rank.
    pub fn emit(&self, event: &Event) {
        match &self.sink {
            Sink::Silent => {}
            Sink::Supervisor => {
                if let Ok(line) = encode(event) {
                    let mut out = std::io::stdout().lock();
                    // If the pipe is closed, the thread that watches the parent ends this process.
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

/// Parses one line of a rank's standard output as an event. `None` if the line is other text or malformed.
pub fn decode(line: &str) -> Option<Event> {
    serde_json::from_str(line.strip_prefix(EVENT_MARK)?.trim_end()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ui::DiskTraffic;

    #[test]
    fn events_round_trip_through_the_pipe() {
        let event = Event::Tick {
            step: 3,
            total: 10,
            loss: Some(1.25),
        };
        assert_eq!(decode(&encode(&event).expect("encodes")), Some(event));
        assert_eq!(decode("plain text"), None);
        assert_eq!(decode("\u{1e}{broken"), None);
    }

    #[test]
    fn non_finite_numbers_round_trip_through_the_pipe() {
        for odd in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let step = StepEvent {
                step: 3,
                total: 10,
                loss: odd,
                lr: odd,
                grad_norm: Some(odd),
                tokens_per_second: odd,
                step_seconds: odd,
                data_wait: odd,
                device_peak_bytes: 1,
                host_bytes: 2,
                skipped: true,
                remaining_seconds: odd,
                disk: Some(DiskTraffic {
                    read_bytes: 1,
                    written_bytes: 2,
                    bytes_per_second: odd,
                    share: odd,
                }),
            };
            let line = encode(&Event::Step(step)).expect("encodes");
            let Some(Event::Step(step)) = decode(&line) else {
                panic!("not read again: {line}");
            };
            assert!(step.loss.is_nan() && step.lr.is_nan() && step.remaining_seconds.is_nan());
            assert!(step.tokens_per_second.is_nan() && step.step_seconds.is_nan());
            assert_eq!((step.step, step.grad_norm, step.skipped), (3, None, true));
            assert!(step.disk.is_some_and(|disk| disk.share.is_nan()));
            let eval = EvalEvent {
                step: 3,
                loss: odd,
                exact_match: Some(odd),
                exact_match_before: None,
                samples: 4,
            };
            let line = encode(&Event::Eval(eval)).expect("encodes");
            let Some(Event::Eval(eval)) = decode(&line) else {
                panic!("not read again: {line}");
            };
            assert!(eval.loss.is_nan() && eval.exact_match.is_none());
        }
    }
}
