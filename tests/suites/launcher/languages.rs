//! Messages in Chinese: by the locale, by `--lang`, and never in what programs read.

use std::process::Command;

use crate::site::{Outcome, Running, Site, assert_says, completed};

/// Fails if a screen has three lower-case English words in a row, outside of quotes and of messages of programs.
fn assert_chinese(screen: &str) {
    let is_word = |word: &&str| word.len() > 1 && word.bytes().all(|b| b.is_ascii_lowercase());
    for line in screen.lines().filter(|line| !line.contains(" | ")) {
        for part in line.split(['`', '\'', '"']).step_by(2) {
            let words: Vec<&str> = part.split(' ').collect();
            let sentence = words.windows(3).find(|words| words.iter().all(is_word));
            assert_eq!(sentence, None, "{screen}");
        }
    }
}

/// The locale of a Chinese user.
const CHINESE: &str = "LANG=zh_CN.UTF-8";

/// Starts the launcher with a variable.
fn start(site: &Site, variable: &str, line: &str) -> Running {
    let mut command = Command::new("env");
    command
        .arg(variable)
        .arg(env!("CARGO_BIN_EXE_tessera_test_launcher"))
        .args(line.split_whitespace());
    site.start_command(command)
}

fn run(site: &Site, variable: &str, line: &str) -> Outcome {
    start(site, variable, line).finish()
}

/// The standard output of `launcher` with a variable.
fn output(site: &Site, variable: &str, line: &str) -> Vec<u8> {
    let output = Command::new(env!("CARGO_BIN_EXE_tessera_test_launcher"))
        .args(line.split_whitespace())
        .current_dir(site.path("."))
        .env_clear()
        .env("HOME", site.path("home"))
        .envs(variable.split_once('='))
        .output()
        .unwrap();
    output.stdout
}

#[test]
fn a_wrong_flag_is_refused_in_the_language_of_the_flag_or_of_the_locale() {
    let site = Site::new();
    let block = [
        "错误[E09] 未知的参数 --zeor",
        "  原因      没有这个名称的参数",
        "  下一步    您是否想用 --zero？",
        "  退出码 2",
    ];
    for (variable, line) in [
        ("LANG=C", "--zeor 3 --lang zh"),
        (CHINESE, "--zeor 3"),
        ("LC_ALL=zh_CN.UTF-8", "--zeor 3"),
        ("LC_MESSAGES=zh_CN.UTF-8", "--zeor 3"),
    ] {
        let outcome = run(&site, variable, line);
        assert_eq!(outcome.code, Some(2), "{variable} {line}");
        assert_says(&outcome.screen, &block);
    }
    for (variable, line) in [
        (CHINESE, "--zeor 3 --lang en"),
        ("LANG=zh_CN.GBK", "--zeor 3"),
        ("LANG=en_US.UTF-8", "--zeor 3"),
    ] {
        let outcome = run(&site, variable, line);
        assert_says(&outcome.screen, &["error[E09] unknown flag --zeor"]);
    }
    let outcome = run(&site, CHINESE, "doctor --lang french");
    assert_says(&outcome.screen, &["错误[E09]", "--lang en，或 --lang zh"]);
}

#[test]
fn the_block_of_every_code_that_a_cpu_can_show_is_chinese() {
    let site = Site::new();
    let mut samples = site.samples();
    samples[0]["conversations"][0]["content"] = "<image>\n<image>\nHow many?".into();
    site.write_samples("doubled", &samples);
    let mut samples = site.samples();
    samples[1]["conversations"]
        .as_array_mut()
        .unwrap()
        .truncate(1);
    site.write_samples("unanswered", &samples);
    std::fs::write(site.path("taken"), "a file").unwrap();
    site.train("--max-steps 1 --output done");
    for (code, line) in [
        ("E02", "--nproc 2 --output out1 --inject kill:rank=1,step=1"),
        ("E06", "--data data/unanswered.json"),
        ("E07", "--data data/doubled.json"),
        ("E08", "--resume nowhere"),
        ("E09", "--zero 9"),
        ("E09", "--offload nowhere=1"),
        ("E09", "--device-memory-limit much"),
        ("E10", "--model nowhere"),
        ("E12", "--device cuda"),
        ("E13", "--output taken/run"),
        ("E16", "--resume done --max-steps 1"),
        ("E17", "--host-memory-limit 1M"),
        ("E18", "--data data/none.json"),
    ] {
        let outcome = run(&site, CHINESE, &completed(line));
        assert_says(&outcome.screen, &[&format!("错误[{code}]")]);
        assert_chinese(&outcome.screen);
    }
    let weights = site.path("model/model.safetensors");
    let whole = std::fs::read(&weights).unwrap();
    let mut broken = whole.clone();
    let end = broken.len();
    broken[end - 4..].fill(0xff);
    std::fs::write(&weights, broken).unwrap();
    let outcome = run(&site, CHINESE, &completed("--output out5"));
    assert_says(&outcome.screen, &["错误[E05]"]);
    assert_chinese(&outcome.screen);
    std::fs::write(&weights, whole).unwrap();
    for line in [
        "plan --model model --data data/samples.json",
        "doctor",
        "data check data/samples.json --model model",
        "ckpt ls done",
        "ckpt verify done",
        "watch done --once",
        "export done --output exported",
        "ckpt consolidate done --output whole",
        "synth --model-config glm-4.1v-9b-thinking --output made --weights seeded",
    ] {
        let shown = output(&site, CHINESE, line);
        let shown = String::from_utf8(shown).unwrap();
        assert!(!shown.is_ascii(), "{line}: {shown}");
        assert_chinese(&shown);
    }
}

#[test]
fn a_run_of_a_chinese_user_plans_trains_and_ends_in_chinese() {
    let site = Site::new();
    let outcome = run(&site, CHINESE, &completed("--max-steps 2 --output out"));
    assert_eq!(outcome.code, Some(0), "{}", outcome.screen);
    assert_says(
        &outcome.screen,
        &[
            " 计划    ",
            " 数据    ",
            " 通信    ",
            " 训练    ",
            " 保存    ",
            " 完成    ",
            " 下一步  报告 ",
        ],
    );
    let english = ["plan ", "done ", "next ", "warning "];
    let left = outcome.screen.lines().find(|line| {
        let label = line.trim_start();
        english.iter().any(|word| label.starts_with(word))
    });
    assert_eq!(left, None, "{}", outcome.screen);
    // What programs read stays in English.
    let log = std::fs::read_to_string(site.path("out/trainer_log.jsonl")).unwrap();
    assert!(log.is_ascii(), "{log}");
    let config = std::fs::read_to_string(site.path("out/config.resolved.json")).unwrap();
    assert!(config.is_ascii(), "{config}");
}

#[test]
fn the_failure_of_a_rank_is_shown_in_chinese_and_stored_in_english() {
    let site = Site::new();
    let line = completed("--max-steps 3 --output out --inject panic:rank=1,step=2");
    let outcome = run(&site, CHINESE, &line);
    assert_eq!(outcome.code, Some(101), "{}", outcome.screen);
    assert_says(
        &outcome.screen,
        &[
            "错误[E19] rank 1 发生 panic：",
            "  原因      这是本程序的缺陷",
        ],
    );
    let stored = std::fs::read_to_string(site.path("out/errors/rank-0001.json")).unwrap();
    let stored: serde_json::Value = serde_json::from_str(&stored).unwrap();
    assert_eq!(stored["cause"], "a bug in this program");
    assert_eq!(stored["zh"]["cause"], "这是本程序的缺陷");
}

#[test]
fn what_programs_read_is_the_same_in_every_language() {
    let site = Site::new();
    for line in ["plan --json", "doctor --json", "ckpt ls . --json"] {
        let line = match line.starts_with("plan") {
            true => completed(line),
            false => line.to_owned(),
        };
        let (english, chinese) = (
            output(&site, "LANG=C", &line),
            output(&site, CHINESE, &line),
        );
        // The survey of a machine has free memory, which changes between two reports.
        let keys = |text: &[u8]| -> String {
            let text = String::from_utf8_lossy(text);
            text.chars()
                .filter(|letter| !letter.is_ascii_digit())
                .collect()
        };
        assert_eq!(keys(&chinese), keys(&english), "{line}");
    }
    let line = completed("--zeor 3 --error-format json");
    let english = run(&site, "LANG=C", &line);
    let chinese = run(&site, CHINESE, &line);
    assert_eq!(chinese.screen, english.screen);
}
