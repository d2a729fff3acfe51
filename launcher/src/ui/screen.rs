//! Terminal output of a run: lines, with a progress bar below them on a terminal.

use std::io::{self, IsTerminal, Write};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::event::Event;
use super::text;
use crate::lang::Lang;

/// Output that shows events: a terminal with a progress bar, or plain lines.
pub struct Screen {
    out: Box<dyn Write + Send>,
    color: bool,
    is_terminal: bool,
    bar: Option<ProgressBar>,
}

impl std::fmt::Debug for Screen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Screen")
            .field("color", &self.color)
            .field("is_terminal", &self.is_terminal)
            .finish_non_exhaustive()
    }
}

impl Screen {
    /// Screen on standard error: with a progress bar and colors on a terminal, else plain lines. `no_color`
    /// turns colors off.
    pub fn on_stderr(no_color: bool) -> Self {
        let is_terminal = io::stderr().is_terminal();
        Self {
            out: Box::new(io::stderr()),
            color: is_terminal && !no_color,
            is_terminal,
            bar: None,
        }
    }

    /// Screen that writes plain lines to `out`.
    pub fn plain(out: Box<dyn Write + Send>) -> Self {
        Self {
            out,
            color: false,
            is_terminal: false,
            bar: None,
        }
    }

    /// Shows one event: as text, or on the progress bar.
    pub fn show(&mut self, event: &Event) {
        match event {
            Event::TrainStart { total, done } if self.is_terminal => self.start_bar(*total, *done),
            Event::Tick { step, loss, .. } => {
                if let Some(bar) = &self.bar {
                    bar.set_position(*step);
                    if let Some(loss) = loss {
                        bar.set_message(format!("loss {loss:.4}"));
                    }
                }
            }
            Event::Done(_) => self.finish_bar(),
            Event::Answer { text } => {
                let mut out = io::stdout().lock();
                // The end of the answer reports a lost text.
                drop(out.write_all(text.as_bytes()).and_then(|()| out.flush()));
            }
            _ => {}
        }
        for line in Lang::chosen().speak(|| text::lines(event)) {
            self.line(&line);
        }
    }

    /// Writes one line; if there is a progress bar, it stays below the line.
    pub fn line(&mut self, line: &str) {
        let text = if self.color {
            coloured(line)
        } else {
            line.to_string()
        };
        let out = &mut self.out;
        // A closed terminal must not stop training.
        let mut write = || drop(writeln!(out, "{text}").and_then(|()| out.flush()));
        match &self.bar {
            Some(bar) => bar.suspend(write),
            None => write(),
        }
    }

    /// Removes the progress bar, for a failure report or at the end.
    pub fn finish_bar(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }

    fn start_bar(&mut self, total: u64, done: u64) {
        self.finish_bar();
        let bar =
            ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr_with_hz(10));
        let template = " {bar:32} {pos}/{len}  {msg}  {elapsed} elapsed, {eta} left";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_position(done);
        bar.reset_eta();
        self.bar = Some(bar);
    }
}

/// Adds colors: the label in bold, warnings and errors in color.
fn coloured(line: &str) -> String {
    let Some(rest) = line.strip_prefix(' ') else {
        return match line.strip_prefix("error[") {
            Some(rest) => format!("\u{1b}[1;31merror[{rest}\u{1b}[0m"),
            None => line.to_string(),
        };
    };
    let end = rest.find(' ').unwrap_or(rest.len());
    if end == 0 {
        return line.to_string();
    }
    let (label, text) = rest.split_at(end);
    let is_warning = [text::WARNING.en, text::WARNING.zh].contains(&label);
    let code = if is_warning { "1;33" } else { "1;36" };
    format!(" \u{1b}[{code}m{label}\u{1b}[0m{text}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    #[derive(Clone, Default)]
    struct Shared(Arc<Mutex<Vec<u8>>>);

    impl Write for Shared {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().expect("lock").extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn plain_screens_write_lines_without_color() {
        let shared = Shared::default();
        let mut screen = Screen::plain(Box::new(shared.clone()));
        screen.show(&Event::TrainStart { total: 2, done: 0 });
        screen.show(&Event::Tick {
            step: 1,
            total: 2,
            loss: Some(1.0),
        });
        screen.show(&Event::Warning {
            text: "careful".into(),
        });
        let text = String::from_utf8(shared.0.lock().expect("lock").clone()).expect("text");
        assert_eq!(text.lines().count(), 2);
        assert!(text.ends_with(" warning careful\n") && !text.contains('\u{1b}'));
    }

    #[test]
    fn labels_are_colored_and_continuations_are_not() {
        assert_eq!(coloured(" plan    x"), " \u{1b}[1;36mplan\u{1b}[0m    x");
        assert_eq!(coloured("         x"), "         x");
        assert!(coloured("error[E01] x").starts_with("\u{1b}[1;31merror[E01]"));
    }
}
