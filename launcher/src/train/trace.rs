//! `--trace-steps`: timelines of the ranks in files for trace viewers.
//!
//! Each rank writes one file in the JSON format of Chrome's `about:tracing` and Perfetto. It contains complete events
//! (`"ph": "X"`) with one process per rank and one thread per lane.

use crate::lang::{Text, both, text};
use std::fs;
use std::ops::Range;
use std::path::Path;

use engine::Trace;
use engine::trace::{Lane, Span};
use serde_json::{Value, json};

use crate::error::{ErrorCode, Failure};

/// Directory of the files inside the run's directory.
const TRACES: &str = "traces";

/// Recorder of the steps `wanted`, which count from 1.
#[derive(Debug)]
pub(crate) struct StepTraces {
    wanted: Option<Range<u64>>,
    running: bool,
}

impl StepTraces {
    pub(crate) fn new(wanted: Option<Range<u64>>) -> Self {
        Self {
            wanted,
            running: false,
        }
    }

    /// Starts recording the trace if `step` is one of the wanted steps.
    pub(crate) fn begin(&mut self, step: u64, trace: &Trace) {
        if !self.running && self.wanted.as_ref().is_some_and(|w| w.contains(&step)) {
            trace.start();
            self.running = true;
        }
    }

    /// Ends step `step`; `last` if no step follows. After the last wanted step, writes the file of `rank`.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn end(
        &mut self,
        (step, last): (u64, bool),
        trace: &Trace,
        output: &Path,
        rank: usize,
    ) -> Result<(), Failure> {
        let over = self.wanted.as_ref().is_none_or(|w| step + 1 >= w.end);
        if !self.running || !(over || last) {
            return Ok(());
        }
        self.running = false;
        let directory = output.join(TRACES);
        let path = directory.join(format!("rank-{rank:04}.json"));
        let text = document(rank, &trace.stop()).to_string();
        let written = fs::create_dir_all(&directory).and_then(|()| fs::write(&path, text));
        written.map_err(|error| {
            Failure::new(
                ErrorCode::Disk,
                text!("cannot write {}", "无法写入 {}", path.display()),
                Text::literal(&error),
            )
            .next(both(
                "omit --trace-steps, or free disk space",
                "请去掉 --trace-steps，或清理磁盘空间",
            ))
        })
    }
}

fn document(rank: usize, spans: &[Span]) -> Value {
    let mut lanes: Vec<Lane> = spans.iter().map(|span| span.lane).collect();
    lanes.sort_unstable();
    lanes.dedup();
    let named = |what: &str, thread: u32, name: String| json!({"ph": "M", "name": what, "pid": rank, "tid": thread, "args": {"name": name}});
    let mut events = vec![named("process_name", 0, format!("rank {rank}"))];
    events.extend(
        lanes
            .iter()
            .map(|lane| named("thread_name", lane.number(), lane.name())),
    );
    events.extend(spans.iter().map(|span| {
        json!({
            "ph": "X", "name": span.name, "pid": rank, "tid": span.lane.number(),
            "ts": span.start.as_nanos() as f64 / 1e3, "dur": span.length.as_nanos() as f64 / 1e3,
        })
    }));
    json!({"displayTimeUnit": "ms", "traceEvents": events})
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn spans_become_complete_events_of_named_lanes() {
        let span = |lane, start| Span {
            lane,
            name: "layers.0".into(),
            start: Duration::from_micros(start),
            length: Duration::from_nanos(1_500),
        };
        let spans = [span(Lane::Compute, 3), span(Lane::Disk(2), 4)];
        let document = document(1, &spans);
        let events = document["traceEvents"].as_array().unwrap();
        assert_eq!(events.len(), 1 + 2 + 2);
        assert_eq!(events[2]["args"]["name"], "disk 2");
        assert_eq!(
            (&events[3]["ts"], &events[3]["dur"]),
            (&json!(3.0), &json!(1.5))
        );
        assert_eq!(events[4]["tid"], events[2]["tid"]);
    }
}
