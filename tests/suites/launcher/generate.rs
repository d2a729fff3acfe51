//! `launcher generate`, `launcher eval`, and the answers that a run saves.

use crate::site::{Site, golden, listing, read_json};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use std::fs;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::{Command, Stdio};

pub(crate) struct Said {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Said {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap()
    }
}

/// The program in the site's directory, without arguments.
pub(crate) fn launcher(site: &Site) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tessera_test_launcher"));
    command
        .current_dir(site.path(""))
        .env_clear()
        // The fake driver starts a compiler.
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        .env("TMPDIR", site.path("tmp"))
        .envs(site.variables())
        .stdin(Stdio::null());
    command
}

/// Runs the program with these words in the site's directory.
pub(crate) fn say(site: &Site, words: &[&str]) -> Said {
    let output = launcher(site).args(words).output().unwrap();
    Said {
        code: output.status.code(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

/// As [`say`] for a line whose words contain no blanks. It must succeed.
pub(crate) fn run(site: &Site, line: &str) -> Said {
    let words: Vec<&str> = line.split_whitespace().collect();
    let said = say(site, &words);
    assert_eq!(said.code, Some(0), "{line}\n{}", said.stderr);
    said
}

/// Expects a refusal of the subcommand with this status, code and words.
pub(crate) fn refuse(site: &Site, line: &str, status: i32, code: &str, words: &[&str]) {
    let split: Vec<&str> = line.split_whitespace().collect();
    let said = say(site, &split);
    let screen = &said.stderr;
    assert_eq!(
        (said.code, &*said.stdout),
        (Some(status), ""),
        "{line}\n{screen}"
    );
    let code = format!("error[{code}] ");
    for word in [&*code, "  cause     ", "  next      "].iter().chain(words) {
        assert!(screen.contains(word), "{line}: no {word:?} in\n{screen}");
    }
}

#[test]
fn a_prompt_is_answered_on_standard_output() {
    let site = Site::new();
    let image = "--image data/image_wide.png --max-new-tokens 6";
    let ask = |more: &str| {
        let line = format!("generate --model model {image} {more}");
        let mut words: Vec<&str> = line.split_whitespace().collect();
        words.extend(["--prompt", "What is to be seen?"]);
        let said = say(&site, &words);
        assert_eq!(said.code, Some(0), "{}", said.stderr);
        said
    };
    let plain = ask("");
    for label in [" load    ", " prompt  ", " answer  ", " memory  "] {
        assert!(plain.stderr.contains(label), "{}", plain.stderr);
    }
    let record = ask("--json").json();
    assert_eq!(
        record["answer"].as_str(),
        Some(plain.stdout.trim_end_matches('\n'))
    );
    assert!(record["tokens"].as_u64().unwrap() <= 6);
    // A wide image is sliced.
    assert!(record["slices"].as_u64().unwrap() > 1);
    assert!(record["prompt_tokens"].as_u64() > record["slices"].as_u64());
    let whole = ask("--json --max-slice-nums 1").json();
    assert_eq!(whole["slices"], 1);
    // Sampling from one candidate is greedy, and random draws follow from the seed.
    assert_eq!(ask("--temperature 2 --top-k 1").stdout, plain.stdout);
    let drawn = |seed: u32| ask(&format!("--temperature 3 --seed {seed}")).stdout;
    assert_eq!(drawn(1), drawn(1));
    assert!((2..6).any(|seed| drawn(seed) != drawn(1)));
    assert_eq!(listing(&site.path("tmp")), Vec::<String>::new());
}

/// Writes `generation_config.json` of the site's model.
fn generation_config(site: &Site, config: &Value) {
    let path = site.path("model/generation_config.json");
    fs::write(path, config.to_string()).unwrap();
}

#[test]
fn tokens_that_generation_config_names_end_an_answer() {
    for pack in ["minicpm-v-2_6", "glm-4v-9b", "glm-ocr", "cogvlm-chat-hf"] {
        let site = Site::with_family(pack);
        let answer = |ids: &Value| {
            generation_config(&site, &json!({"eos_token_id": ids}));
            let ask = "--prompt Hello --max-new-tokens 3 --json";
            let record = run(&site, &format!("generate --model model {ask}")).json();
            (
                record["tokens"].as_u64().unwrap(),
                record["stopped_by"].clone(),
            )
        };
        assert_eq!(answer(&Value::Null), (3, json!("length")), "{pack}");
        // The token that comes first ends an answer in a list, and alone. Once it is looked for, by halves.
        let mut ids: Vec<usize> = (0..1024).collect();
        assert_eq!(answer(&json!(ids)), (0, json!("end")), "{pack}");
        while pack == "glm-4v-9b" && ids.len() > 1 {
            let half = ids.split_off(ids.len() / 2);
            if answer(&json!(ids)).0 > 0 {
                ids = half;
            }
        }
        if let [id] = ids[..] {
            assert_eq!(answer(&json!(id)), (0, json!("end")), "{pack}");
        }
    }
}

#[test]
fn settings_of_generation_config_that_are_not_used_are_named_and_kept_in_exports() {
    let site = Site::with_family("minicpm-v-2_6");
    let config = json!({"eos_token_id": [2], "do_sample": true, "temperature": 0.8, "top_p": 0.6,
        "repetition_penalty": 1.05, "transformers_version": "4.44.0", "max_length": null});
    generation_config(&site, &config);
    let named = "generation_config.json: do_sample true, repetition_penalty 1.05, temperature 0.8, top_p 0.6 not used;";
    let lines = |text: &str| text.matches(named).count();
    let ask = "generate --model model --prompt Hello --max-new-tokens 3";
    let said = run(&site, &format!("{ask} --top-k 5")).stderr;
    assert!(said.contains("--top-k has no effect"), "{said}");
    let said = run(&site, ask);
    assert_eq!(lines(&said.stderr), 1, "{}", said.stderr);
    // The most likely tokens all the same.
    assert_eq!(run(&site, ask).stdout, said.stdout);
    let eval = "eval --model model --data data/samples.json --max-new-tokens 2 --nproc 2";
    let said = run(&site, eval);
    assert_eq!(lines(&said.stderr), 1, "{}", said.stderr);
    site.train("--max-steps 1 --lora-rank 2");
    run(&site, "export out --merge --output merged");
    assert_eq!(
        read_json(&site.path("merged/generation_config.json")),
        config
    );
    // Greedy settings need no line.
    generation_config(&site, &json!({"do_sample": false, "temperature": 0.8}));
    let said = run(&site, ask);
    assert!(
        !said.stderr.contains("generation_config"),
        "{}",
        said.stderr
    );
    generation_config(&site, &json!({"eos_token_id": "</s>"}));
    refuse(
        &site,
        ask,
        10,
        "E10",
        &["generation_config.json", "eos_token_id"],
    );
}

#[test]
fn files_in_f16_are_computed_in_f16_where_their_family_allows_it() {
    for (pack, words) in [
        ("minicpm-v-2_6", "parameters in f16 · "),
        ("cogvlm-chat-hf", "parameters in f16 · "),
        ("glm-4v-9b", "parameters in bf16 · "),
        ("glm-ocr", "parameters in bf16 · "),
    ] {
        let site = Site::with_family(pack);
        site.train("--max-steps 1 --train norm");
        run(&site, "export out --merge --dtype f16 --output half");
        let ask = "generate --model half --prompt Hello --max-new-tokens 2";
        let said = run(&site, ask);
        assert!(said.stderr.contains(words), "{pack}: {}", said.stderr);
        let widened = said.stderr.contains("not in the files' f16");
        assert_eq!(widened, pack.starts_with("glm"), "{pack}: {}", said.stderr);
        let said = run(&site, &format!("{ask} --precision bf16"));
        assert!(said.stderr.contains("in bf16 · "), "{}", said.stderr);
        assert!(
            !said.stderr.contains("not in the files'"),
            "{}",
            said.stderr
        );
    }
}

#[test]
fn prompts_with_several_images_and_without_any_are_answered() {
    let site = Site::new();
    let tokens = |line: &str| {
        let line = format!("generate --model model --json --max-new-tokens 2 --prompt Why? {line}");
        let record = run(&site, &line).json();
        let count = |key: &str| record[key].as_u64().unwrap();
        (count("prompt_tokens"), count("slices"))
    };
    let (none, without) = tokens("");
    let one = "--max-slice-nums 1 --image data/image_wide.png";
    let (single, slices) = tokens(one);
    assert_eq!((without, slices), (0, 1));
    assert!(single > none);
    let (double, slices) = tokens(&format!("{one} --image data/image_wide.png"));
    assert_eq!(slices, 2);
    assert!(double > single);
}

/// Expects the evaluation of the subcommand to equal the one saved by the run.
fn assert_evaluates_alike(site: &Site, line: &str) -> Value {
    let said = run(
        site,
        &format!("eval --data data/samples.json --output rows.json {line}"),
    );
    let result = said.json();
    let left = read_json(&site.path("out/eval_results.json"));
    for key in ["eval_loss", "exact_match"] {
        let (subcommand, run) = (result[key].as_f64().unwrap(), left[key].as_f64().unwrap());
        assert_eq!(
            subcommand.to_bits(),
            run.to_bits(),
            "{key}: {subcommand} {run}"
        );
    }
    for key in ["eval_samples", "eval_runtime", "eval_samples_per_second"] {
        assert!(result[key].is_number(), "no {key} in {result}");
    }
    let rows = read_json(&site.path("rows.json"));
    assert_eq!(rows["eval_loss"], result["eval_loss"]);
    let kept = read_json(&site.path("out/samples/step-000002.json"));
    let (rows, kept) = (
        rows["samples"].as_array().unwrap(),
        kept.as_array().unwrap(),
    );
    assert_eq!((rows.len(), kept.len()), (6, 6));
    for (row, kept) in rows.iter().zip(kept) {
        for key in [
            "index",
            "id",
            "images",
            "prompt",
            "reference",
            "answer",
            "exact",
        ] {
            assert_eq!(row[key], kept[key], "{key}");
        }
    }
    result
}

#[test]
fn a_saved_model_evaluates_as_it_did_in_its_run() {
    let site = Site::new();
    site.train("--zero 3 --nproc 2 --offload cpu --eval-data data/samples.json --eval-steps 2");
    assert_eq!(
        listing(&site.path("out/samples")),
        ["step-000000.json", "step-000002.json"]
    );
    let first = &read_json(&site.path("out/samples/step-000000.json"))[0];
    assert_eq!((&first["index"], &first["id"]), (&0.into(), &"0".into()));
    assert!(Path::new(first["images"][0].as_str().unwrap()).is_file());
    assert!(first["prompt"].as_str().unwrap().contains("<image>"));
    assert!(!first["reference"].as_str().unwrap().is_empty());
    let result = assert_evaluates_alike(&site, "--model out/checkpoint-2");
    // The batch size does not change the result, and `--limit` leaves samples out.
    let line = "--model out/checkpoint-2 --per-device-eval-batch-size 1";
    assert_eq!(
        assert_evaluates_alike(&site, line)["eval_loss"],
        result["eval_loss"]
    );
    // The samples are not replaced by the result.
    for output in ["data/samples.json", "data/rows.json"] {
        let data = if output == "data/rows.json" {
            "data"
        } else {
            output
        };
        let line = format!("eval --model out/checkpoint-2 --data {data} --output {output}");
        refuse(&site, &line, 2, "E09", &["--output", "another directory"]);
    }
    let line = "eval --model out/checkpoint-2 --data data/samples.json --limit 2";
    assert_eq!(run(&site, line).json()["eval_samples"], 2);
    let line = "generate --model out/checkpoint-2 --prompt Why? --max-new-tokens 3";
    run(&site, line);
}

#[test]
fn adapters_and_trained_parts_are_applied_to_their_base() {
    for flags in [
        "--use-lora true --lora-rank 4 --modules-to-save resampler --train lm_head --tune-vision false",
        "--train lm_head,norm",
    ] {
        let site = Site::new();
        site.train(&format!(
            "{flags} --learning-rate 1e-2 --eval-data data/samples.json --eval-steps 2"
        ));
        let adapter = "--model model --adapter out/checkpoint-2";
        let with = assert_evaluates_alike(&site, adapter);
        let base = run(&site, "eval --model model --data data/samples.json").json();
        assert_ne!(with["eval_loss"], base["eval_loss"], "{flags}");
        assert!(
            with["adapter"]
                .as_str()
                .unwrap()
                .ends_with("out/checkpoint-2")
        );
        let said = run(
            &site,
            &format!("generate {adapter} --prompt Why? --max-new-tokens 3"),
        );
        assert!(said.stderr.contains("out/checkpoint-2"), "{}", said.stderr);
        // A run means its latest checkpoint, and a checkpoint knows its base, which it alone fits.
        for model in ["out", "out/checkpoint-2"] {
            let line = format!("eval --model {model} --data data/samples.json");
            assert_eq!(run(&site, &line).json()["eval_loss"], with["eval_loss"]);
        }
        fs::rename(site.path("model"), site.path("elsewhere")).unwrap();
        let line = "generate --model out --prompt Why?";
        refuse(
            &site,
            line,
            10,
            "E10",
            &["/model does not exist", "--adapter"],
        );
        fs::rename(site.path("elsewhere"), site.path("model")).unwrap();
        write_trained(&site, "part", "llm.lm_head.weight");
        let line = "generate --model part --prompt Why?";
        let words = ["it holds adapters or trained parts", "--adapter"];
        refuse(&site, line, 10, "E10", &words);
        for name in [
            "config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        ] {
            let other = golden("minicpm-o-2_6").join(name);
            fs::copy(other, site.path("model").join(name)).unwrap();
        }
        let preprocessor = golden("minicpm-o-2_6").join("preprocessor_config.json");
        fs::copy(preprocessor, site.path("model/preprocessor_config.json")).unwrap();
        let line = format!("generate {adapter} --prompt Why?");
        refuse(
            &site,
            &line,
            10,
            "E10",
            &["does not belong to this model", "the model needs"],
        );
    }
}

/// A draw of six tokens about a sliced image, on the CPU.
const DRAW: &str = "generate --model model --image data/image_wide.png --max-new-tokens 6 --temperature 1.5 \
                    --device cpu --prompt Why?";

#[test]
fn ranks_and_tiers_answer_as_one_process_does() {
    let site = Site::new();
    let ask = |more: &str| run(&site, &format!("{DRAW} --json {more}")).json();
    let alone = ask("");
    for more in [
        "--nproc 2",
        "--offload cpu",
        "--nproc 2 --offload nvme:spill",
    ] {
        let answered = ask(more);
        for key in ["answer", "tokens", "stopped_by", "prompt_tokens", "slices"] {
            assert_eq!(answered[key], alone[key], "{more}: {key}");
        }
    }
    let said = run(&site, &format!("{DRAW} --nproc 2"));
    let answer = alone["answer"].as_str().unwrap();
    assert_eq!(said.stdout, format!("{answer}\n"));
    assert_eq!(said.stderr.matches(" answer  ").count(), 1);
    let evaluate = |more: &str| {
        let line = "eval --model model --data data/samples.json --device cpu --output rows.json";
        let result = run(&site, &format!("{line} {more}")).json();
        let loss = result["eval_loss"].as_f64().unwrap().to_bits();
        (loss, read_json(&site.path("rows.json"))["samples"].clone())
    };
    let alone = evaluate("");
    assert_eq!(alone.1.as_array().unwrap().len(), 6);
    // Six samples on four ranks: some have one and some two.
    for more in [
        "--nproc 2 --offload cpu",
        "--nproc 4 --per-device-eval-batch-size 1",
    ] {
        assert_eq!(evaluate(more), alone, "{more}");
    }
    assert_eq!(listing(&site.path("tmp")), Vec::<String>::new());
}

#[test]
fn tiles_answer_and_evaluate_with_the_same_bits() {
    let site = Site::new();
    // On the CPU a tile has at most 256 rows.
    let long = site.samples().into_iter().map(|mut sample| {
        let said = sample["conversations"][0]["content"].as_str().unwrap();
        let more = "Where is it, and why? ".repeat(120);
        sample["conversations"][0]["content"] = format!("{said} {more}").into();
        sample
    });
    site.write_samples("long", &long.collect::<Vec<_>>());
    let evaluate = |more: &str| {
        let line = "eval --model model --data data/long.json --device cpu --max-new-tokens 4 --output rows.json";
        let result = run(&site, &format!("{line} {more}")).json();
        let loss = result["eval_loss"].as_f64().unwrap().to_bits();
        (loss, read_json(&site.path("rows.json"))["samples"].clone())
    };
    let whole = evaluate("");
    assert_eq!(evaluate("--mlp-tile-tokens 7"), whole);
    assert_eq!(evaluate("--mlp_tile_tokens 7 --nproc 2"), whole);
    let question = "Where is it, and why? ".repeat(120);
    let ask = |more: &str| {
        let line =
            "generate --model model --device cpu --json --max-new-tokens 6 --temperature 1.5";
        let mut words: Vec<&str> = line.split_whitespace().collect();
        words.extend(["--prompt", &question]);
        words.extend(more.split_whitespace());
        let said = say(&site, &words);
        assert_eq!(said.code, Some(0), "{}", said.stderr);
        let record = said.json();
        assert!(
            record["prompt_tokens"].as_u64().unwrap() > 3 * 256,
            "{record}"
        );
        [
            &record["answer"],
            &record["tokens"],
            &record["prompt_tokens"],
        ]
        .map(Value::clone)
    };
    let whole = ask("");
    assert_eq!(ask("--mlp-tile-tokens 7"), whole);
    for line in ["generate --prompt Why?", "eval --data data/long.json"] {
        let line = format!("{line} --model model --mlp-tile-tokens 0");
        refuse(&site, &line, 2, "E09", &["--mlp-tile-tokens 0"]);
    }
}

#[test]
fn an_answer_is_written_as_its_tokens_come() {
    let site = Site::new();
    for more in ["", "--nproc 2"] {
        // Each write is a datagram.
        let (ours, theirs) = UnixDatagram::pair().unwrap();
        let mut command = launcher(&site);
        command.args(DRAW.split_whitespace().chain(more.split_whitespace()));
        let mut child = command
            .stdout(OwnedFd::from(theirs))
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        drop(command);
        assert!(child.wait().unwrap().success());
        ours.set_nonblocking(true).unwrap();
        let mut pieces = Vec::new();
        let mut bytes = [0; 256];
        while let Ok(count) = ours.recv(&mut bytes) {
            pieces.push(String::from_utf8(bytes[..count].to_vec()).unwrap());
        }
        assert!(pieces.len() > 3, "{pieces:?}");
        let whole = run(&site, &format!("{DRAW} {more}")).stdout;
        assert_eq!(pieces.concat(), whole);
    }
}

#[test]
fn a_signal_ends_an_answer_of_several_ranks() {
    let site = Site::new();
    let mut command = launcher(&site);
    command.args(DRAW.split_whitespace());
    // The most likely tokens never end an answer of this model.
    command.args("--max-new-tokens 100000 --temperature 0 --nproc 2".split_whitespace());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut first = [0];
    child
        .stdout
        .as_mut()
        .unwrap()
        .read_exact(&mut first)
        .unwrap();
    let pid = child.id().to_string();
    assert!(
        Command::new("kill")
            .args(["-TERM", &pid])
            .status()
            .unwrap()
            .success()
    );
    let output = child.wait_with_output().unwrap();
    let screen = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(130), "{screen}");
    assert!(screen.contains("stopped by a signal"), "{screen}");
    assert!(!screen.contains("--resume"), "{screen}");
    assert_eq!(listing(&site.path("tmp")), Vec::<String>::new());
}

#[test]
fn bounds_of_image_areas_shorten_the_prompt() {
    let site = Site::new();
    let model = golden("glm-4.1v-9b-thinking").display().to_string();
    let tokens = |more: &str| {
        let line = format!(
            "generate --model {model} --image data/image_wide.png --max-new-tokens 1 --json --device cpu"
        );
        let record = run(&site, &format!("{line} --prompt Why? {more}")).json();
        record["prompt_tokens"].as_u64().unwrap()
    };
    let whole = tokens("");
    // The image has 9100 pixels.
    assert!(tokens("--image-max-pixels 7000") < whole);
    assert!(tokens("--image-min-pixels 100000") > whole);
    let said = run(&site, &format!("{DRAW} --image-max-pixels 20000"));
    assert!(
        said.stderr.contains("--image-max-pixels has no effect"),
        "{}",
        said.stderr
    );
    let line = format!("{DRAW} --image-max-pixels 5 --image-min-pixels 6");
    refuse(&site, &line, 2, "E09", &["--image-min-pixels"]);
}

/// Writes a directory with one trained tensor.
fn write_trained(site: &Site, directory: &str, tensor: &str) {
    let view = TensorView::new(Dtype::F32, vec![1], &[0; 4]).unwrap();
    let bytes = safetensors::serialize([(tensor, view)], None).unwrap();
    fs::create_dir(site.path(directory)).unwrap();
    fs::write(site.path(directory).join("trained.safetensors"), bytes).unwrap();
}

#[test]
fn impossible_generate_and_eval_commands_are_refused() {
    let site = Site::new();
    write_trained(&site, "stranger", "llm.nothing.weight");
    write_trained(&site, "misshaped", "llm.lm_head.weight");
    let ask = "generate --model model --prompt Why?";
    for (line, status, code, words) in [
        ("generate --prompt Why?", 2, "E09", &["needs --model"][..]),
        ("generate --model model", 2, "E09", &["needs --prompt"]),
        ("eval --model model", 2, "E09", &["needs --data"]),
        (
            &format!("{ask} --imgae x"),
            2,
            "E09",
            &["did you mean --image?"],
        ),
        (
            &format!("{ask} --temperature -1"),
            2,
            "E09",
            &["temperature"],
        ),
        (&format!("{ask} --top-p 0"), 2, "E09", &["top_p"]),
        (
            &format!("{ask} --max-new-tokens 0"),
            2,
            "E09",
            &["--max-new-tokens 0"],
        ),
        (&format!("{ask} --image none.png"), 3, "E18", &["none.png"]),
        (
            &format!("{ask} --image model/config.json"),
            3,
            "E18",
            &["config.json"],
        ),
        (
            "generate --model model --prompt <image>",
            3,
            "E07",
            &["1 image placeholders"],
        ),
        (
            &format!("{ask} --model-max-length 5"),
            3,
            "E06",
            &["--model-max-length 5"],
        ),
        (
            &format!("{ask} --adapter nowhere"),
            10,
            "E10",
            &["nowhere", "--adapter"],
        ),
        (
            &format!("{ask} --adapter stranger"),
            10,
            "E10",
            &["the model has no tensor llm.nothing.weight"],
        ),
        (
            &format!("{ask} --adapter misshaped"),
            10,
            "E10",
            &["llm.lm_head.weight is [1]", "the model needs"],
        ),
        (
            "generate --model nowhere --prompt Why?",
            10,
            "E10",
            &["nowhere"],
        ),
        (
            "eval --model model --data none.json",
            3,
            "E18",
            &["none.json"],
        ),
        (
            "eval --model model --data data/samples.json --limit 0",
            2,
            "E09",
            &["--limit 0"],
        ),
        (
            "eval --model model --data data/samples.json --model-max-length 12",
            3,
            "E06",
            &["6 of 6 samples"],
        ),
        (
            "eval --model model --data data/samples.json --output no/such/rows.json",
            16,
            "E13",
            &["no/such/rows.json"],
        ),
    ] {
        refuse(&site, line, status, code, words);
    }
}
