//! Rendering of a view as lines of text.

use super::view::{State, View};
use crate::lang::{Both, Text, both, text};
use crate::report::monitor::split::StepSplit;
use crate::units::{bytes, clock, count};

/// Characters of the progress bar.
const BAR: usize = 24;
/// Characters of the sparkline, lowest first.
const HEIGHTS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
/// Excess of a rank's own time over the mean of all ranks, as a share, from which the text names the rank.
const NAMED: f64 = 0.05;

/// Text of `launcher watch` for a run, in the language that is spoken. Values that the run has not reported yet have no line.
pub(super) fn render(view: &View) -> String {
    let mut out = String::new();
    let mut line = |label: Both, text: Option<String>| {
        if let Some(text) = text {
            out += &format!(" {label:<7} {text}\n");
        }
    };
    line(
        both("run", "运行"),
        Some(format!("{} · {}", view.run, state(view))),
    );
    line(
        both("plan", "计划"),
        view.plan.as_ref().map(Text::to_string),
    );
    line(
        both("step", "步"),
        (view.total_steps > 0).then(|| progress(view)),
    );
    line(both("loss", "损失"), loss(view));
    line(both("rates", "速率"), rates(view));
    line(both("time", "时间"), time(view));
    line(both("memory", "内存"), memory(view));
    line(both("saved", "已保存"), view.checkpoint.clone());
    line(both("eval", "评估"), evaluation(view));
    for failure in &view.failures {
        out += &format!("{failure}\n");
    }
    out
}

fn state(view: &View) -> Text {
    let age = clock(view.seconds_since_news);
    let news = format!("{} s", view.seconds_since_news.round());
    let age = if view.seconds_since_news < 600.0 {
        news
    } else {
        age
    };
    match view.state {
        State::Starting => text!(
            "starting · last update {age} ago",
            "正在启动 · 上次更新在 {age} 前"
        ),
        State::Running => text!(
            "running · last update {age} ago",
            "正在运行 · 上次更新在 {age} 前"
        ),
        State::Finished => both("finished", "已完成").into(),
        State::Stopped => both(
            "stopped before the last step, saved",
            "在最后一步之前停止，已保存",
        )
        .into(),
        State::Failed => both("failed", "失败").into(),
        State::Dead => text!(
            "dead: no update for {age}, and no process is running it",
            "已中断：{age} 没有更新，也没有进程在运行它"
        ),
    }
}

fn progress(view: &View) -> String {
    let share = view.step as f64 / view.total_steps.max(1) as f64;
    let full = ((share * BAR as f64) as usize).min(BAR);
    let mut text = text!(
        "{} of {} · [{}{}] {:.0} %",
        "{} / {} · [{}{}] {:.0} %",
        view.step,
        view.total_steps,
        "#".repeat(full),
        "-".repeat(BAR - full),
        100.0 * share
    );
    if let Some(elapsed) = view.elapsed_seconds {
        text += text!(" · {} so far", " · 已用 {}", clock(elapsed));
    }
    if let Some(left) = view.remaining_seconds {
        text += text!(" · {} left", " · 剩余 {}", clock(left));
    }
    text.to_string()
}

fn loss(view: &View) -> Option<String> {
    let mut text = format!("{:.4}", view.loss?);
    if let Some(first) = view.first_loss {
        text += &text!(" · began at {first:.4}", " · 开始时 {first:.4}").to_string();
    }
    Some(format!("{text} · {}", sparkline(&view.recent_losses)))
}

/// The values as a sparkline in one line. Values that are not finite leave a gap.
fn sparkline(values: &[f64]) -> String {
    let finite = || values.iter().copied().filter(|value| value.is_finite());
    let (low, high) = (
        finite().fold(f64::MAX, f64::min),
        finite().fold(f64::MIN, f64::max),
    );
    let span = (high - low).max(f64::MIN_POSITIVE);
    let most = (HEIGHTS.len() - 1) as f64;
    let letter = |value: &f64| {
        let height = ((value - low) / span * most).round();
        HEIGHTS
            .get(height as usize)
            .filter(|_| value.is_finite())
            .copied()
            .unwrap_or(' ')
    };
    values.iter().map(letter).collect()
}

fn rates(view: &View) -> Option<String> {
    let mut text = format!("lr {:.1e}", view.lr?);
    if let Some(norm) = view.grad_norm {
        text += &format!(" · gnorm {norm:.3}");
    }
    if let Some(rate) = view.tokens_per_second {
        text += &format!(" · {} tok/s", count(rate.max(0.0) as u64));
    }
    Some(text)
}

fn time(view: &View) -> Option<String> {
    let milliseconds = 1e3 * view.step_seconds?;
    let mut text = text!("{milliseconds:.0} ms a step", "每步 {milliseconds:.0} ms");
    if let Some(split) = &view.seconds {
        let total = split.total().max(f64::MIN_POSITIVE);
        let parts = StepSplit::NAMES.into_iter().zip(split.values());
        for (name, seconds) in parts.filter(|(_, seconds)| *seconds > 0.0) {
            let (name, share) = (part(name), 100.0 * seconds / total);
            text += text!(" · {name} {share:.0} %", " · {name} {share:.0} %");
        }
    }
    if let Some(slowest) = view.slowest.as_ref().filter(|s| s.imbalance > NAMED) {
        text += text!(
            "\n         slowest rank {}: own time {:+.0} % of the mean, most of it in {}",
            "\n         最慢的 rank {}：自身用时比平均值 {:+.0} %，主要在{}",
            slowest.rank,
            100.0 * slowest.imbalance,
            part(&slowest.part)
        );
    }
    Some(text.to_string())
}

fn memory(view: &View) -> Option<String> {
    let used = view.memory?;
    let mut text = text!("device {}", "设备 {}", bytes(used.device));
    if used.host > 0 {
        text += text!(" · host {}", " · 主机 {}", bytes(used.host));
    }
    if let Some(planned) = view.planned_bytes {
        text += text!(" · planned total {}", " · 计划总计 {}", bytes(planned));
    }
    text += text!(" · resident {}", " · 常驻 {}", bytes(used.rss));
    Some(text.to_string())
}

/// Name of a part of a step.
fn part(name: &str) -> Text {
    match name {
        "data" => both("data", "数据").into(),
        "forward" => both("forward", "前向").into(),
        "communication" => both("communication", "通信").into(),
        "backward" => both("backward", "反向").into(),
        "step" => both("step", "更新").into(),
        "offload" => both("offload", "卸载").into(),
        other => Text::literal(other),
    }
}

fn evaluation(view: &View) -> Option<String> {
    let eval = view.evaluation.as_ref()?;
    let mut text = text!(
        "step {} · loss {:.4}",
        "第 {} 步 · 损失 {:.4}",
        eval.step,
        eval.loss
    );
    if let Some(exact) = eval.exact_match {
        text += text!(" · exact match {exact:.2}", " · 完全匹配 {exact:.2}");
        if let Some(before) = eval.exact_match_before {
            text += text!(" (was {before:.2})", "（之前 {before:.2}）");
        }
    }
    Some(text.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::watch::view::Presence;
    use crate::report::RunFiles;
    use serde_json::json;

    #[test]
    fn the_sparkline_follows_the_loss() {
        assert_eq!(sparkline(&[4.0, 3.0, 2.0, 1.0, f64::NAN, 0.5]), "█▆▄▂ ▁");
        assert_eq!(sparkline(&[1.0, 1.0]), "▁▁");
        assert_eq!(sparkline(&[]), "");
    }

    #[test]
    fn a_view_is_printed_as_lines() {
        let row = json!({
            "current_steps": 10, "total_steps": 40, "loss": 0.5, "lr": 1e-3, "grad_norm": 1.25,
            "elapsed_time": "0:01:01", "remaining_time": "0:03:03", "tokens_per_second": 9700.0,
            "step_seconds": 0.2, "bytes": {"device": 15 << 20, "host": 10 << 20, "rss": 80 << 20},
            "seconds": {"data": 0.0, "forward": 0.06, "communication": 0.04, "backward": 0.1, "step": 0.0, "offload": 0.0},
            "slowest_rank": 1, "slowest_part": "backward", "imbalance": 0.31,
        });
        let files = RunFiles {
            directory: "runs/demo".into(),
            rows: vec![row],
            ..RunFiles::default()
        };
        let view = View::new(
            &files,
            Presence {
                is_held: true,
                seconds_since_news: 3.0,
            },
        );
        assert_eq!(
            render(&view),
            " run     runs/demo · running · last update 3 s ago\n \
             step    10 of 40 · [######------------------] 25 % · 0:01:01 so far · 0:03:00 left\n \
             loss    0.5000 · began at 0.5000 · ▁\n \
             rates   lr 1.0e-3 · gnorm 1.250 · 9.7k tok/s\n \
             time    200 ms a step · forward 30 % · communication 20 % · backward 50 %\n         \
             slowest rank 1: own time +31 % of the mean, most of it in backward\n \
             memory  device 15.0M · host 10.0M · resident 80.0M\n"
        );
        let left = Presence {
            is_held: false,
            seconds_since_news: 3700.0,
        };
        let dead = render(&View::new(&files, left));
        assert!(dead.contains("dead: no update for 1:01:40"), "{dead}");
        assert!(!dead.contains("left"), "{dead}");
    }
}
