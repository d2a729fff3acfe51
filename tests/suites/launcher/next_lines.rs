//! Next steps that are command lines: each is typed as it was printed, and does what it says.

use crate::endings::LONG;
use crate::site::{Outcome, Site, assert_says, losses};
use std::fs;
use std::process::Command;

const RUN: &str = "--save-steps 1 --lr-scheduler-type constant --nproc 2 --max-steps 4";

/// Command lines under `next` on a screen. None may be flags alone.
fn commands(screen: &str) -> Vec<String> {
    let lines = screen.lines().map(str::trim);
    let lines = lines.skip_while(|line| !line.starts_with("next "));
    let lines = lines.map(|line| line.strip_prefix("next").map_or(line, str::trim));
    let lines: Vec<String> = lines
        .filter(|line| line.starts_with("launcher ") || line.starts_with("--"))
        .map(str::to_owned)
        .collect();
    assert!(!lines.is_empty(), "{screen}");
    for line in &lines {
        assert!(line.starts_with("launcher "), "{line}\n{screen}");
    }
    lines
}

/// Types a line into a shell, in which `launcher` is the program. `more` comes before the line's comment.
fn typed(site: &Site, line: &str, more: &str) -> Outcome {
    let program = env!("CARGO_BIN_EXE_tessera_test_launcher");
    let (line, comment) = line.split_once("   # ").unwrap_or((line, ""));
    let mut shell = Command::new("sh");
    let script = format!("launcher() {{ '{program}' \"$@\"; }}\n{line} {more}   # {comment}");
    shell.args(["-c", &script]);
    let outcome = site.start_command(shell).finish();
    site.assert_tidy();
    outcome
}

/// Types a line that must succeed.
fn succeeds(site: &Site, line: &str, more: &str) -> Outcome {
    let outcome = typed(site, line, more);
    assert_eq!(outcome.code, Some(0), "{line}\n{}", outcome.screen);
    outcome
}

#[test]
fn an_interrupted_run_continues_by_the_line_it_prints() {
    let site = Site::new();
    let mut run = site.start(LONG);
    run.wait_for_step();
    run.signal("INT");
    let outcome = run.finish();
    let done = losses(&site.path("out")).len();
    let [line] = &commands(&outcome.screen)[..] else {
        panic!("one line: {}", outcome.screen);
    };
    succeeds(&site, line, &format!("--max-steps {}", done + 2));
    assert_eq!(losses(&site.path("out")).len(), done + 2);
}

#[test]
fn a_suggested_flag_replaces_the_typed_one() {
    let site = Site::new();
    let outcome = site.run("--nproc 5 --mp-size 2 --max-steps 1 --gradient-accumulation-steps 1");
    assert_eq!(outcome.code, Some(2), "{}", outcome.screen);
    let [line] = &commands(&outcome.screen)[..] else {
        panic!("one line: {}", outcome.screen);
    };
    assert_eq!(line.matches("--nproc").count(), 1, "{line}");
    assert!(line.ends_with(" --nproc 6"), "{line}");
    succeeds(&site, line, "");
}

#[test]
fn data_that_cannot_be_read_is_answered_with_a_line_that_reads_it() {
    let site = Site::new();
    let talk =
        r#"[{"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}]"#;
    fs::write(site.path("data/talk.json"), talk).unwrap();
    let run = "--model model --precision f32 --max-steps 1 --output said";
    let outcome = site.run(&format!("{run} --data data/talk.json --data-format alpaca"));
    let lines = commands(&outcome.screen);
    succeeds(&site, &lines[0], "");
    // Images in a directory beside that of the data.
    fs::create_dir(site.path("elsewhere")).unwrap();
    fs::copy(
        site.path("data/image_wide.png"),
        site.path("elsewhere/w.png"),
    )
    .unwrap();
    let seen = r#"[{"messages": [{"role": "user", "content": "<image>q"}, {"role": "assistant", "content": "a"}], "images": ["w.png"]}]"#;
    fs::write(site.path("data/seen.json"), seen).unwrap();
    let run = "--model model --precision f32 --max-steps 1 --output shown";
    let outcome = site.run(&format!("{run} --data data/seen.json"));
    let lines = commands(&outcome.screen);
    assert!(lines[0].contains("--image-dir elsewhere"), "{lines:?}");
    succeeds(&site, &lines[0], "");
    // A path that goes up is read as a whole path, which the answer names.
    let out = seen.replace("w.png", "../elsewhere/w.png");
    fs::write(site.path("data/out.json"), out).unwrap();
    let screen = site.refuse("--data data/out.json --output away", 3, "E18");
    assert!(!screen.contains("--image-dir"), "{screen}");
    let file = site.path("elsewhere/w.png").canonicalize().unwrap();
    let file = file.to_str().unwrap();
    assert!(
        screen.contains(&format!("write {file} instead of ../elsewhere/w.png")),
        "{screen}"
    );
    fs::write(site.path("data/out.json"), seen.replace("w.png", file)).unwrap();
    site.train("--data data/out.json --max-steps 1 --output away");
    // No form reads these.
    for more in [r#""audio": "x.wav""#, r#""kto_tag": false"#] {
        let talk = talk.replacen('{', &format!("{{{more}, "), 1);
        fs::write(site.path("data/talk.json"), talk).unwrap();
        let screen = site.refuse("--data data/talk.json --output x", 3, "E18");
        assert!(!screen.contains("--data-format"), "{screen}");
    }
}

#[test]
fn a_failed_run_continues_by_the_line_it_prints() {
    for fault in [
        "kill:rank=1,step=3",
        "panic:rank=0,step=3",
        "disk-full:rank=0,step=2",
    ] {
        let site = Site::new();
        let outcome = site.run(&format!("{RUN} --inject {fault}"));
        let lines = commands(&outcome.screen);
        let line = lines.last().unwrap();
        assert!(line.contains("# continues from checkpoint-"), "{line}");
        succeeds(&site, line, "");
        assert!(site.path("out/checkpoint-4").is_dir());
        assert_eq!(losses(&site.path("out")).len(), 4, "{fault}");
        // Typed once more, it says that nothing is left.
        let again = succeeds(&site, line, "");
        assert_says(&again.screen, &["already completed all 4 steps"]);
    }
}

#[test]
fn suggestions_for_memory_fit_as_typed() {
    let site = Site::new();
    for line in [
        "--nproc 2 --zero 0 --checkpoint-activations none --host-memory-limit 90M",
        "--nproc 2 --zero 1 --per-device-train-batch-size 4 --device-memory-limit 7M",
    ] {
        let screen = site.refuse(line, 5, "E17");
        let lines = commands(&screen);
        assert!(lines[0].ends_with(", fits"), "{screen}");
        for line in &lines {
            succeeds(&site, line, "");
            fs::remove_dir_all(site.path("out")).unwrap();
        }
    }
}

#[test]
fn a_refused_resume_names_a_line_that_succeeds() {
    let site = Site::new();
    site.train(RUN);
    let screen = site.refuse("--resume auto --precision bf16 --max-steps 5", 9, "E08");
    let [line] = &commands(&screen)[..] else {
        panic!("one line: {screen}");
    };
    succeeds(&site, line, "");
    assert!(site.path("out/checkpoint-5").is_dir());
    // Another run's directory, and a damaged checkpoint.
    let screen = site.refuse("", 2, "E09");
    succeeds(&site, &commands(&screen)[0], "--max-steps 6");
    let weights = site.path("out/checkpoint-6/model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&weights, bytes).unwrap();
    let screen = site.refuse("--resume out --max-steps 7", 9, "E08");
    let [line] = &commands(&screen)[..] else {
        panic!("one line: {screen}");
    };
    assert!(
        line.contains("--resume") && line.contains("# checkpoint-5 is"),
        "{line}"
    );
    succeeds(&site, line, "--max-steps 6");
}

#[test]
fn a_directory_without_settings_never_starts_the_demo() {
    let site = Site::new();
    site.train(RUN);
    fs::remove_file(site.path("out/config.resolved.json")).unwrap();
    for line in ["--resume out", "--resume out/checkpoint-4"] {
        let outcome = site.start_plain(line).finish();
        assert_eq!(outcome.code, Some(2), "{line}\n{}", outcome.screen);
        assert_says(&outcome.screen, &["error[E09] the settings of "]);
    }
}
