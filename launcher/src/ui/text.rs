//! Rendering of events as plain lines.

use super::event::{
    DataEvent, DoneEvent, EvalEvent, Event, PlanEvent, ResumeEvent, SaveEvent, StepEvent, TrainRow,
};
use crate::units::{bytes, count, grouped, seconds};

/// Text of an event as lines without colors. Empty for events that only move the progress bar.
pub fn lines(event: &Event) -> Vec<String> {
    match event {
        Event::Note { flag, reason } => {
            let have = if flag.contains(", ") { "have" } else { "has" };
            vec![line("note", &format!("{flag} {have} no effect: {reason}"))]
        }
        Event::Info { label, text } => text
            .lines()
            .enumerate()
            .map(|(i, text)| line(if i == 0 { label } else { "" }, text))
            .collect(),
        Event::Warning { text } => vec![line("warning", text)],
        Event::Plan(plan) => plan_lines(plan),
        Event::Trains(rows) => train_lines(rows),
        Event::Data(data) => data_lines(data),
        Event::Comm {
            ranks,
            transport,
            seconds: time,
        } => {
            vec![line(
                "comm",
                &format!(
                    "{} in {} · {transport}",
                    plural(*ranks, "rank"),
                    seconds(*time)
                ),
            )]
        }
        Event::Load {
            bytes: read,
            files,
            seconds: time,
        } => vec![line(
            "load",
            &format!(
                "{} {} in {}",
                plural(*files, "file"),
                bytes(*read),
                seconds(*time)
            ),
        )],
        Event::TrainStart { done, .. } => {
            let mut head = Vec::new();
            if *done > 0 {
                head.push(line("train", &format!("continues after step {done}")));
            }
            head.push(line(
                if *done > 0 { "" } else { "train" },
                "  step     loss        lr   gnorm   tok/s      step  data  mem(peak)",
            ));
            head
        }
        Event::Tick { .. } => Vec::new(),
        Event::Step(step) => vec![step_line(step)],
        Event::Eval(eval) => vec![eval_line(eval)],
        Event::Save(save) => vec![save_line(save)],
        Event::Resume(resume) => vec![resume_line(resume)],
        Event::Done(done) => done_lines(done),
    }
}

fn line(label: &str, text: &str) -> String {
    format!(" {label:<7} {text}").trim_end().to_string()
}

fn plural(number: usize, noun: &str) -> String {
    format!(
        "{} {noun}{}",
        grouped(number as u64),
        if number == 1 { "" } else { "s" }
    )
}

fn plan_lines(plan: &PlanEvent) -> Vec<String> {
    let share = 100.0 * plan.trainable as f64 / plan.params.max(1) as f64;
    let share = if share > 0.0 && share < 1.0 {
        format!("{share:.2}")
    } else {
        format!("{share:.0}")
    };
    let parts: Vec<String> = plan.per_rank.iter().map(ToString::to_string).collect();
    let verdict = if plan.host_fits { "ok" } else { "DOES NOT FIT" };
    let limit = plan.host_limit_bytes.map(bytes);
    let limit = limit.map_or_else(String::new, |limit| format!("  limit {limit}"));
    vec![
        line(
            "plan",
            &format!(
                "{} {} params · trainable {} ({share} %) · {}{} on {} · ZeRO-{} · {}{}",
                plan.model,
                count(plan.params),
                count(plan.trainable),
                plural(plan.ranks, "rank"),
                plan.shard_group
                    .map_or_else(String::new, |ranks| format!(" in shard groups of {ranks}")),
                plan.device,
                plan.stage,
                plan.precision,
                if plan.offload == "none" {
                    String::new()
                } else {
                    format!(" · offload {}", plan.offload)
                },
            ),
        ),
        line("", &format!("per rank  {}", parts.join("  "))),
        line(
            "",
            &format!(
                "host {}  free {}  reserve {}{limit}  need {}  {verdict}",
                bytes(plan.host_total_bytes),
                bytes(plan.host_free_bytes),
                bytes(plan.host_reserve_bytes),
                bytes(plan.host_need_bytes)
            ),
        ),
    ]
}

fn train_lines(rows: &[TrainRow]) -> Vec<String> {
    let width = rows.iter().map(|row| row.module.len()).max().unwrap_or(0);
    let lines = rows.iter().enumerate().map(|(i, row)| {
        let text = format!(
            "{:<width$}  {:>4} {:<7}  {:>6}  {}  lr {:.1e}",
            row.module,
            grouped(row.tensors as u64),
            if row.tensors == 1 {
                "tensor"
            } else {
                "tensors"
            },
            count(row.params),
            row.dtype,
            row.lr
        );
        line(if i == 0 { "trains" } else { "" }, &text)
    });
    lines.collect()
}

fn data_lines(data: &DataEvent) -> Vec<String> {
    let mut text = plural(data.samples, "sample");
    if data.eval_samples > 0 {
        text += &format!(" + {} held out", grouped(data.eval_samples as u64));
    }
    text += &format!(
        " · longest {} tokens · {} ok · supervised tokens min {}",
        grouped(data.longest_tokens as u64),
        plural(data.images, "image"),
        data.supervised_min_tokens
    );
    if data.skipped > 0 {
        text += &format!(" · {} skipped", plural(data.skipped, "bad sample"));
    }
    let mut lines = vec![line("data", &text)];
    if let Some(global_batch) = data.wraps_around_global_batch {
        lines.push(line(
            "",
            &format!(
                "fewer samples ({}) than one step takes ({global_batch}): samples wrap around and repeat within a step",
                data.samples
            ),
        ));
    }
    lines
}

fn step_line(step: &StepEvent) -> String {
    let norm = step
        .grad_norm
        .map_or_else(|| "-".to_string(), |norm| format!("{norm:.3}"));
    let milliseconds = step.step_seconds * 1e3;
    let time = if milliseconds < 9999.5 {
        format!("{milliseconds:.0} ms")
    } else {
        format!("{:.1} s", step.step_seconds)
    };
    let host = if step.host_bytes == 0 {
        String::new()
    } else {
        format!(" / host {}", bytes(step.host_bytes))
    };
    let disk = step
        .disk
        .map_or_else(String::new, |disk| format!(" / {disk}"));
    line(
        "",
        &format!(
            "{:>6} {:>8.4}  {:>8.1e}  {norm:>6}  {:>6}  {time:>8}  {:>2.0} %  {}{host}{disk}{}",
            step.step,
            step.loss,
            step.lr,
            count(step.tokens_per_second.max(0.0) as u64),
            100.0 * step.data_wait,
            bytes(step.device_peak_bytes),
            if step.skipped {
                "  update skipped: not finite"
            } else {
                ""
            },
        ),
    )
}

fn eval_line(eval: &EvalEvent) -> String {
    let mut text = format!("step {} · loss {:.4}", eval.step, eval.loss);
    if let Some(exact) = eval.exact_match {
        text += &format!(" · exact match {exact:.2}");
        if let Some(before) = eval.exact_match_before {
            text += &format!(" (was {before:.2})");
        }
    }
    line(
        "eval",
        &format!("{text} · {}", plural(eval.samples, "sample")),
    )
}

fn save_line(save: &SaveEvent) -> String {
    line(
        "save",
        &format!(
            "{} · weights {} + state {} · {}, hashed",
            save.name,
            bytes(save.weight_bytes),
            bytes(save.state_bytes),
            plural(save.files, "file")
        ),
    )
}

fn resume_line(resume: &ResumeEvent) -> String {
    let verdict = match resume.loss_is_identical {
        None => format!("continues after step {}", resume.step),
        Some(true) => "evaluation loss is the same, bit for bit".to_string(),
        Some(false) => "evaluation loss DIFFERS".to_string(),
    };
    line(
        "resume",
        &format!(
            "{} on {} · {verdict}",
            resume.name,
            plural(resume.ranks, "rank")
        ),
    )
}

fn done_lines(done: &DoneEvent) -> Vec<String> {
    let what = if done.interrupted { "stopped" } else { "done" };
    let mut lines = vec![line(
        what,
        &format!("{} · {}", seconds(done.seconds), done.output.display()),
    )];
    let warnings = done.warnings.iter();
    lines.extend(warnings.map(|warning| line("warning", warning)));
    for (index, next) in done.next.iter().enumerate() {
        lines.push(line(if index == 0 { "next" } else { "" }, next));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ui::PlanPart;

    fn text(event: &Event) -> String {
        lines(event).join("\n")
    }

    #[test]
    fn the_plan_fits_on_three_lines() {
        let part = |name: &str, device_bytes, host_bytes| PlanPart {
            name: name.into(),
            device_bytes,
            host_bytes,
        };
        let mut plan = PlanEvent {
            model: "demo".into(),
            params: 1_300_000,
            trainable: 1_300_000,
            ranks: 2,
            device: "cpu".into(),
            shard_group: None,
            stage: 3,
            precision: "f32".into(),
            offload: "cpu".into(),
            per_rank: vec![part("params", 1 << 20, 0), part("optimizer", 0, 8 << 20)],
            host_total_bytes: 64 << 30,
            host_free_bytes: 41 << 30,
            host_reserve_bytes: 3 << 30,
            host_limit_bytes: None,
            host_need_bytes: 1 << 28,
            host_fits: true,
            backward_share: 0.0,
            memory: None,
        };
        assert_eq!(
            text(&Event::Plan(plan.clone())),
            " plan    demo 1.3M params · trainable 1.3M (100 %) · 2 ranks on cpu · ZeRO-3 · f32 · offload cpu\n         \
             per rank  params 1.0M  optimizer 0 (host 8.0M)\n         \
             host 64.0G  free 41.0G  reserve 3.0G  need 256M  ok"
        );
        plan.host_need_bytes = 1 << 40;
        plan.host_fits = false;
        plan.trainable = 10_000;
        let plan = text(&Event::Plan(plan));
        assert!(
            plan.contains("DOES NOT FIT") && plan.contains("(0.77 %)"),
            "{plan}"
        );
    }

    #[test]
    fn columns_of_the_step_table_are_aligned() {
        let head = lines(&Event::TrainStart { total: 10, done: 0 }).remove(0);
        let row = step_line(&StepEvent {
            step: 10,
            total: 240,
            loss: 2.8712,
            lr: 5e-4,
            grad_norm: Some(1.4),
            tokens_per_second: 11_900.0,
            step_seconds: 0.038,
            data_wait: 0.01,
            device_peak_bytes: 25 << 20,
            host_bytes: 182 << 20,
            skipped: false,
            remaining_seconds: 9.0,
            disk: None,
        });
        assert_eq!(
            row,
            "             10   2.8712    5.0e-4   1.400   11.9k     38 ms   1 %  25.0M / host 182M"
        );
        for (name, value) in [
            ("step", "10"),
            ("loss", "2.8712"),
            ("lr", "5.0e-4"),
            ("gnorm", "1.400"),
            ("tok/s", "11.9k"),
        ] {
            let end = |text: &str, part: &str| text.find(part).expect(part) + part.len();
            assert_eq!(end(&head, name), end(&row, value), "{name}\n{head}\n{row}");
        }
    }

    #[test]
    fn a_wrap_around_of_few_samples_is_reported() {
        let data = DataEvent {
            samples: 3,
            eval_samples: 0,
            longest_tokens: 96,
            images: 3,
            supervised_min_tokens: 5,
            skipped: 1,
            wraps_around_global_batch: Some(32),
        };
        let text = text(&Event::Data(data));
        assert!(
            text.contains("wrap around") && text.contains("1 bad sample skipped"),
            "{text}"
        );
    }

    #[test]
    fn results_are_printed_as_sentences() {
        let eval = EvalEvent {
            step: 60,
            loss: 0.23,
            exact_match: Some(0.94),
            exact_match_before: Some(0.125),
            samples: 96,
        };
        assert_eq!(
            text(&Event::Eval(eval)),
            " eval    step 60 · loss 0.2300 · exact match 0.94 (was 0.12) · 96 samples"
        );
        let resume = ResumeEvent {
            name: "checkpoint-60".into(),
            ranks: 1,
            step: 60,
            loss_is_identical: Some(true),
        };
        assert_eq!(
            text(&Event::Resume(resume)),
            " resume  checkpoint-60 on 1 rank · evaluation loss is the same, bit for bit"
        );
        let done = DoneEvent {
            seconds: 19.4,
            output: "runs/demo".into(),
            interrupted: false,
            warnings: vec!["w".into()],
            next: vec!["a".into(), "b".into()],
        };
        assert_eq!(
            text(&Event::Done(done)),
            " done    19.4 s · runs/demo\n warning w\n next    a\n         b"
        );
        assert!(
            lines(&Event::Tick {
                step: 1,
                total: 2,
                loss: None
            })
            .is_empty()
        );
    }
}
