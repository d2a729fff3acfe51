//! Checkpoints of other trainers: SAT directories and torch files, from `--model` to an exported directory.

use crate::generate::{refuse, run, say};
use crate::site::{Site, fixture};
use models::WeightSource;
use models::adapter::Adapter;
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::path::Path;

/// The bytes of the tensor `name` as they are stored.
fn stored(source: &WeightSource, name: &str) -> Vec<u8> {
    source.read(name, source.dtype(name).unwrap()).unwrap()
}

fn sat(name: &str) -> String {
    fixture("sat-checkpoints").join(name).display().to_string()
}

/// Compares the tensors of `dir` with the hashes of the pack.
fn same_tensors(dir: &Path, pack: &Path) {
    let bytes = std::fs::read(pack.join("expected.json")).unwrap();
    let expected: Value = serde_json::from_slice(&bytes).unwrap();
    let expected = expected["tensors"].as_object().unwrap();
    let source = WeightSource::open(dir).unwrap();
    assert_eq!(source.names().count(), expected.len());
    for (name, facts) in expected {
        let sum = Sha256::digest(stored(&source, name));
        let sum: String = sum.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(sum, facts["sha256"], "{name}");
    }
}

const ASK: &str = "--prompt hello --max-new-tokens 4";

#[test]
fn a_sat_checkpoint_trains_answers_and_comes_back() {
    let site = Site::with_family("cogvlm-chat-hf");
    let parts = ["part_b", "part_a"].map(|part| sat(&format!("cogvlm-mp2-two-folders/{part}")));
    let both = format!("--model {},{} --tokenizer model", parts[0], parts[1]);
    let outcome = site.train(&format!(
        "{both} --output out --lora-rank 2 --max-steps 1 --precision bf16"
    ));
    assert!(outcome.screen.contains("part_b"), "{}", outcome.screen);
    let answer = run(&site, &format!("generate {both} {ASK}"));
    run(&site, &format!("generate --model out {ASK}"));
    run(&site, &format!("data check data/samples.json {both}"));
    run(
        &site,
        &format!("eval {both} --data data/samples.json --limit 1 --max-new-tokens 2"),
    );
    run(
        &site,
        &format!(
            "import {} {} --tokenizer model --output hub",
            parts[0], parts[1]
        ),
    );
    same_tensors(
        &site.path("hub"),
        &fixture("sat-checkpoints/cogvlm-mp2-two-folders"),
    );
    assert_eq!(
        run(&site, &format!("generate --model hub {ASK}")).stdout,
        answer.stdout
    );
    // SAT in, SAT out.
    run(
        &site,
        "export out --format sat --mp-size 2 --output trained",
    );
    run(
        &site,
        &format!("generate --model trained --tokenizer model {ASK}"),
    );
    run(&site, "export hub --format sat --mp-size 2 --output again");
    run(&site, "import again --output third");
    let [one, other] = ["hub", "third"]
        .map(|name| std::fs::read(site.path(name).join("model.safetensors")).unwrap());
    assert!(one == other);
    let alone = format!("generate --model {} --tokenizer model {ASK}", parts[1]);
    refuse(
        &site,
        &alone,
        10,
        "E10",
        &["lacks model-parallel rank 1 of 2", "DIR1,DIR2"],
    );
    let bare = format!("generate --model {},{} {ASK}", parts[0], parts[1]);
    refuse(&site, &bare, 10, "E10", &["--tokenizer"]);
    refuse(
        &site,
        "export hub --format sat --mp-size 5 --output no",
        10,
        "E10",
        &["cannot be divided among 5 ranks", "--mp-size that divides"],
    );
    refuse(
        &site,
        "export hub --mp-size 2 --output no",
        2,
        "E09",
        &["--format sat"],
    );
}

#[test]
fn unmerged_matrices_become_an_adapter_for_peft() {
    let site = Site::with_family("cogvlm-chat-hf");
    let pack = fixture("sat-checkpoints/cogvlm-mp1-bf16-lora");
    let line = format!("import {} --tokenizer model --output hub", pack.display());
    run(&site, &line);
    same_tensors(&site.path("hub"), &pack);
    let adapter = Adapter::open(&site.path("hub/adapter")).unwrap();
    let matrices = WeightSource::open_file(&pack.join("expected_lora.safetensors")).unwrap();
    let module = "model.layers.0.self_attn.language_expert_query_key_value";
    let [a, b] = adapter.halves(module);
    let values = |name: &str| {
        let elems = adapter.shape(name).unwrap().iter().product();
        let mut bytes = vec![0; elems * 2];
        adapter
            .read_range(name, 0..elems, kernels::DType::BF16, &mut bytes)
            .unwrap();
        bytes
    };
    let part = |half: &str, i: usize| stored(&matrices, &format!("{module}.{half}.{i}"));
    assert_eq!(
        values(&a),
        (0..3)
            .flat_map(|i| part("matrix_A", i))
            .collect::<Vec<u8>>()
    );
    // Three projections of 48 rows, rank 4: a row of B has the values of its projection, and zeros.
    let joined = values(&b);
    for (row, columns) in joined.chunks(2 * 12).enumerate() {
        let (projection, inside) = (row / 48, row % 48);
        let mut expected = [0; 2 * 12];
        let own = &part("matrix_B", projection)[inside * 8..inside * 8 + 8];
        expected[projection * 8..projection * 8 + 8].copy_from_slice(own);
        assert_eq!(columns, expected, "row {row}");
    }
    let ask = |line: &str| run(&site, &format!("generate {line} {ASK}")).stdout;
    let merged = ask(&format!("--model {} --tokenizer model", pack.display()));
    assert_eq!(ask("--model hub --adapter hub/adapter"), merged);
    run(
        &site,
        &format!("import {} --merge --output merged", pack.display()),
    );
    run(
        &site,
        "export hub/adapter --model hub --merge --output exported",
    );
    let expected = WeightSource::open_file(&pack.join("expected_merged.safetensors")).unwrap();
    for dir in ["merged", "exported"] {
        let source = WeightSource::open(&site.path(dir)).unwrap();
        for name in expected.names() {
            let (got, want) = (stored(&source, name), stored(&expected, name));
            let differing = got
                .chunks(2)
                .zip(want.chunks(2))
                .filter(|(a, b)| a != b)
                .count();
            // Sums in another order may round to the neighboring value.
            assert!(
                differing * 1000 <= want.len() / 2,
                "{dir} {name}: {differing}"
            );
        }
    }
}

#[test]
fn torch_files_are_models_and_nothing_in_them_runs() {
    let site = Site::new();
    for pack in ["minicpm-v-2_6-single", "cogvlm-sharded", "cogvlm-legacy"] {
        let pack = fixture("torch-bin").join(pack);
        same_tensors(&pack, &pack);
        run(&site, &format!("generate --model {} {ASK}", pack.display()));
    }
    let single = fixture("torch-bin/minicpm-v-2_6-single");
    site.train(&format!(
        "--model {} --output out --max-steps 1 --precision f32",
        single.display()
    ));
    refuse(
        &site,
        "export out --format sat --output no",
        10,
        "E10",
        &["has no place in a SAT checkpoint", "omit --format sat"],
    );
    // safetensors files count where both exist.
    std::fs::copy(
        single.join("pytorch_model.bin"),
        site.path("model/pytorch_model.bin"),
    )
    .unwrap();
    let screen = site.train("--output both --max-steps 1").screen;
    assert!(screen.contains("not pytorch_model.bin"), "{screen}");
    std::fs::remove_file(site.path("model/model.safetensors")).unwrap();
    let hostile = fixture("torch-bin/hostile/reduce_os_system.bin");
    std::fs::copy(hostile, site.path("model/pytorch_model.bin")).unwrap();
    let line = format!("generate --model model {ASK}");
    refuse(
        &site,
        &line,
        10,
        "E10",
        &["os.system", "nothing was executed"],
    );
    assert!(!site.path("HOSTILE_reduce_os_system").exists());
    std::fs::remove_file(site.path("model/pytorch_model.bin")).unwrap();
    for index in [
        "shard_missing",
        "tensor_missing",
        "path_escape",
        "index_truncated",
    ] {
        for entry in std::fs::read_dir(fixture("torch-bin/bad-indexes").join(index)).unwrap() {
            let path = entry.unwrap().path();
            std::fs::copy(&path, site.path("model").join(path.file_name().unwrap())).unwrap();
        }
        let words: Vec<&str> = line.split(' ').collect();
        let said = say(&site, &words);
        assert_eq!(said.code, Some(10), "{index}: {}", said.stderr);
        for entry in std::fs::read_dir(site.path("model")).unwrap() {
            let path = entry.unwrap().path();
            if path.display().to_string().contains("pytorch_model") {
                std::fs::remove_file(path).unwrap();
            }
        }
    }
}
