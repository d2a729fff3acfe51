//! Rendering of events as plain lines.

use std::fmt::Display;

use super::event::{
    DataEvent, DoneEvent, EvalEvent, Event, PlanEvent, ResumeEvent, SaveEvent, StepEvent, TrainRow,
};
use crate::lang::{Both, Text, both, text};
use crate::units::{bytes, count, grouped, seconds};

/// Text of an event as lines without colors, in the language that is spoken. Empty for events that only move the
/// progress bar.
pub fn lines(event: &Event) -> Vec<String> {
    match event {
        Event::Note { flag, reason } => {
            let have = if flag.contains(", ") { "have" } else { "has" };
            let text = text!(
                "{flag} {have} no effect: {reason}",
                "{flag} 不起作用：{reason}"
            );
            vec![line(both("note", "说明"), text)]
        }
        Event::Info { label, text } => labeled(label, text),
        Event::Warning { text } => vec![line(WARNING, text)],
        Event::Answer { .. } => Vec::new(),
        Event::Plan(plan) => plan_lines(plan),
        Event::Trains(rows) => train_lines(rows),
        Event::Quantized(weights) => vec![line(both("quant", "量化"), weights)],
        Event::Stages(stages) => labeled(both("stages", "流水线"), stages),
        Event::Data(data) => data_lines(data),
        Event::Comm {
            ranks,
            transport,
            seconds: time,
        } => {
            let transport = match transport.as_str() {
                "shared memory" => both("shared memory", "共享内存").into(),
                other => Text::literal(other),
            };
            let text = text!(
                "{} in {} · {transport}",
                "{}，用时 {} · {transport}",
                plural(*ranks, "rank", "个 rank"),
                seconds(*time)
            );
            vec![line(both("comm", "通信"), text)]
        }
        Event::Load {
            bytes: read,
            files,
            seconds: time,
        } => {
            let text = text!(
                "{} {} in {}",
                "{} {}，用时 {}",
                plural(*files, "file", "个文件"),
                bytes(*read),
                seconds(*time)
            );
            vec![line(both("load", "加载"), text)]
        }
        Event::TrainStart { done, .. } => {
            let label = both("train", "训练");
            let head = "  step     loss        lr   gnorm   tok/s      step  data  mem(peak)";
            match *done {
                0 => vec![line(label, head)],
                done => vec![
                    line(
                        label,
                        text!("continues after step {done}", "从第 {done} 步之后继续"),
                    ),
                    line(NONE, head),
                ],
            }
        }
        Event::Tick { .. } => Vec::new(),
        Event::Step(step) => vec![step_line(step)],
        Event::Eval(eval) => vec![eval_line(eval)],
        Event::Save(save) => vec![save_line(save)],
        Event::Resume(resume) => vec![resume_line(resume)],
        Event::Done(done) => done_lines(done),
    }
}

/// Label of a continuation line.
const NONE: Both = both("", "");
/// Label of a warning.
pub(super) const WARNING: Both = both("warning", "警告");

fn line(label: impl Display, text: impl Display) -> String {
    format!(" {label:<7} {text}").trim_end().to_string()
}

/// A text of several lines, with the label before the first.
fn labeled(label: impl Display, text: impl Display) -> Vec<String> {
    let text = text.to_string();
    let lines = text.lines().enumerate();
    let lines = lines.map(|(i, text)| match i {
        0 => line(&label, text),
        _ => line(NONE, text),
    });
    lines.collect()
}

fn plural(number: usize, noun: &str, zh: &str) -> Text {
    let shown = grouped(number as u64);
    let s = if number == 1 { "" } else { "s" };
    Text::new(format!("{shown} {noun}{s}"), format!("{shown} {zh}"))
}

fn plan_lines(plan: &PlanEvent) -> Vec<String> {
    let share = 100.0 * plan.trainable as f64 / plan.params.max(1) as f64;
    let share = if share > 0.0 && share < 1.0 {
        format!("{share:.2}")
    } else {
        format!("{share:.0}")
    };
    let verdict = if plan.host_fits {
        both("ok", "放得下")
    } else {
        both("DOES NOT FIT", "放不下")
    };
    let limit = plan.host_limit_bytes.map(bytes);
    let limit = limit.map(|limit| text!("  limit {limit}", "  上限 {limit}"));
    let limit = limit.unwrap_or_default();
    let groups = plan.shard_group.map(|ranks| {
        text!(
            " in shard groups of {ranks}",
            "（每 {ranks} 个为一个分片组）"
        )
    });
    let groups = groups.unwrap_or_default();
    let offload =
        (plan.offload != "none").then(|| text!(" · offload {}", " · 卸载到 {}", plan.offload));
    let offload = offload.unwrap_or_default();
    vec![
        line(
            both("plan", "计划"),
            text!(
                "{} {} params · trainable {} ({share} %) · {}{} on {} · ZeRO-{} · {}{}",
                "{} 参数 {} · 可训练 {}（{share} %）· {}{}，设备 {} · ZeRO-{} · {}{}",
                plan.model,
                count(plan.params),
                count(plan.trainable),
                plural(plan.ranks, "rank", "个 rank"),
                groups,
                plan.device,
                plan.stage,
                plan.precision,
                offload,
            ),
        ),
        line(
            NONE,
            text!(
                "per rank  {parts}",
                "每个 rank  {parts}",
                parts = Text::join(&plan.per_rank, "  ")
            ),
        ),
        line(
            NONE,
            text!(
                "host {}  free {}  reserve {}{limit}  need {}  {verdict}",
                "主机内存 {}  空闲 {}  预留 {}{limit}  需要 {}  {verdict}",
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
        let tensors = match row.tensors {
            1 => both("tensor", "个张量"),
            _ => both("tensors", "个张量"),
        };
        let text = format!(
            "{:<width$}  {:>4} {tensors:<7}  {:>6}  {}  lr {:.1e}",
            row.module,
            grouped(row.tensors as u64),
            count(row.params),
            row.dtype,
            row.lr
        );
        match i {
            0 => line(both("trains", "训练"), text),
            _ => line(NONE, text),
        }
    });
    lines.collect()
}

fn data_lines(data: &DataEvent) -> Vec<String> {
    let mut text = plural(data.samples, "sample", "个样本");
    if data.eval_samples > 0 {
        let held_out = grouped(data.eval_samples as u64);
        text += text!(" + {held_out} held out", " + {held_out} 个留出样本");
    }
    text += text!(
        " · longest {} tokens · {} ok · supervised tokens min {}",
        " · 最长 {} 个 token · {}正常 · 被监督的 token 最少 {}",
        grouped(data.longest_tokens as u64),
        plural(data.images, "image", "张图片"),
        data.supervised_min_tokens
    );
    if data.skipped > 0 {
        let skipped = plural(data.skipped, "bad sample", "个坏样本");
        text += text!(" · {skipped} skipped", " · 跳过 {skipped}");
    }
    let mut lines = vec![line(both("data", "数据"), text)];
    if let Some(global_batch) = data.wraps_around_global_batch {
        let samples = data.samples;
        lines.push(line(
            NONE,
            text!(
                "fewer samples ({samples}) than one step takes ({global_batch}): samples wrap around and repeat within a step",
                "样本数（{samples}）少于一步所需的数量（{global_batch}）：样本会循环使用，在一步之内重复出现"
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
    let host = match step.host_bytes {
        0 => String::new(),
        host => format!(" / {} {}", both("host", "主机"), bytes(host)),
    };
    let disk = step
        .disk
        .map_or_else(String::new, |disk| format!(" / {disk}"));
    let skipped = match step.skipped {
        true => both("  update skipped: not finite", "  更新已跳过：出现非有限值"),
        false => NONE,
    };
    line(
        NONE,
        format!(
            "{:>6} {:>8.4}  {:>8.1e}  {norm:>6}  {:>6}  {time:>8}  {:>2.0} %  {}{host}{disk}{skipped}",
            step.step,
            step.loss,
            step.lr,
            count(step.tokens_per_second.max(0.0) as u64),
            100.0 * step.data_wait,
            bytes(step.device_peak_bytes),
        ),
    )
}

fn eval_line(eval: &EvalEvent) -> String {
    let (step, loss) = (eval.step, eval.loss);
    let mut text = text!(
        "step {step} · loss {loss:.4}",
        "第 {step} 步 · 损失 {loss:.4}"
    );
    if let Some(exact) = eval.exact_match {
        text += text!(" · exact match {exact:.2}", " · 完全匹配 {exact:.2}");
        if let Some(before) = eval.exact_match_before {
            text += text!(" (was {before:.2})", "（训练前 {before:.2}）");
        }
    }
    let samples = plural(eval.samples, "sample", "个样本");
    line(both("eval", "评估"), format!("{text} · {samples}"))
}

fn save_line(save: &SaveEvent) -> String {
    line(
        both("save", "保存"),
        text!(
            "{} · weights {} + state {} · {}, hashed",
            "{} · 权重 {} + 训练状态 {} · {}，带哈希",
            save.name,
            bytes(save.weight_bytes),
            bytes(save.state_bytes),
            plural(save.files, "file", "个文件")
        ),
    )
}

fn resume_line(resume: &ResumeEvent) -> String {
    let step = resume.step;
    let verdict = match resume.loss_is_identical {
        None => text!("continues after step {step}", "从第 {step} 步之后继续"),
        Some(true) => both(
            "evaluation loss is the same, bit for bit",
            "评估损失逐位相同",
        )
        .into(),
        Some(false) => both("evaluation loss DIFFERS", "评估损失不一致").into(),
    };
    line(
        both("resume", "续训"),
        text!(
            "{} on {} · {verdict}",
            "{}，{} · {verdict}",
            resume.name,
            plural(resume.ranks, "rank", "个 rank")
        ),
    )
}

fn done_lines(done: &DoneEvent) -> Vec<String> {
    let what = match done.interrupted {
        true => both("stopped", "已停止"),
        false => both("done", "完成"),
    };
    let total = format!("{} · {}", seconds(done.seconds), done.output.display());
    let mut lines = vec![line(what, total)];
    lines.extend(done.warnings.iter().map(|warning| line(WARNING, warning)));
    for (index, next) in done.next.iter().enumerate() {
        lines.push(match index {
            0 => line(both("next", "下一步"), next),
            _ => line(NONE, next),
        });
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lang::Lang;
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
    fn lines_of_labels_are_aligned_in_chinese() {
        let events = [
            Event::Done(DoneEvent {
                seconds: 19.4,
                output: "19.4 s".into(),
                interrupted: true,
                warnings: vec![Text::literal("19.4 s")],
                next: vec![Text::literal("19.4 s"), Text::literal("19.4 s")],
            }),
            Event::TrainStart { total: 2, done: 0 },
        ];
        let shown = Lang::Zh.speak(|| events.iter().flat_map(lines).collect::<Vec<_>>());
        assert!(shown[0].contains("已停止"), "{shown:?}");
        for line in &shown {
            let at = line.find("19.4 s").or(line.find("  step")).expect("a text");
            assert_eq!(crate::lang::columns(&line[..at]), 9, "{line}");
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
