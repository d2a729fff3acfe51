//! Forms of data that load: one example of each, and the table of them in the documentation.

use std::fs;
use std::path::{Path, PathBuf};

use models::data::{RawSample, read_datasets};
use models::image::{ImageFolder, ImageSource};

/// An example of a form.
struct Example {
    /// What the form is called and where it comes from.
    form: &'static str,
    /// Name of the file, or what `--data` says after the directory.
    data: &'static str,
    /// Content of the file; empty for one beside this test.
    content: &'static str,
    /// The first sample in the normal form.
    sample: &'static str,
}

const fn of(
    form: &'static str,
    data: &'static str,
    content: &'static str,
    sample: &'static str,
) -> Example {
    Example {
        form,
        data,
        content,
        sample,
    }
}

const EXAMPLES: &[Example] = &[
    of(
        "MiniCPM",
        "a.json",
        r#"[{"id": "0", "image": "i.png", "conversations": [{"role": "user", "content": "<image>q"}, {"role": "assistant", "content": "a"}]}]"#,
        "user: <image>q / assistant: a",
    ),
    of(
        "MiniCPM, images by name",
        "a.json",
        r#"[{"image": {"<image_00>": "i.png", "<image_01>": "i.png"}, "conversations": [{"role": "user", "content": "<image_00><image_01>q"}, {"role": "assistant", "content": "a"}]}]"#,
        "user: <image_00><image_01>q / assistant: a",
    ),
    of(
        "GLM-4V",
        "a.jsonl",
        r#"{"messages": [{"role": "user", "content": "q", "image": "i.png"}, {"role": "assistant", "content": "a"}]}"#,
        "user: q / assistant: a",
    ),
    of(
        "messages (LLaMA-Factory, ms-swift)",
        "a.jsonl",
        r#"{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "<image>q"}, {"role": "assistant", "content": "a"}], "images": ["i.png"]}"#,
        "system: s / user: <image>q / assistant: a",
    ),
    of(
        "OpenAI, typed parts",
        "a.jsonl",
        r#"{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "i.png"}}, {"type": "text", "text": "q"}]}, {"role": "assistant", "content": [{"type": "text", "text": "a"}]}]}"#,
        "user: <image>q / assistant: a",
    ),
    of(
        "LLaMA-Factory v1, typed parts",
        "a.jsonl",
        r#"{"messages": [{"role": "user", "content": [{"type": "image_url", "value": "i.png"}, {"type": "text", "value": "q"}]}, {"role": "assistant", "content": [{"type": "text", "value": "a"}]}]}"#,
        "user: <image>q / assistant: a",
    ),
    of(
        "TRL, typed parts",
        "a.jsonl",
        r#"{"images": ["i.png"], "messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "q"}]}, {"role": "assistant", "content": [{"type": "text", "text": "a"}]}]}"#,
        "user: <image>q / assistant: a",
    ),
    of(
        "TRL, prompt and completion",
        "a.jsonl",
        r#"{"image": "i.png", "prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "a"}]}"#,
        "user: q / assistant: a",
    ),
    of(
        "ShareGPT, LLaVA",
        "a.json",
        r#"[{"id": 1, "image": "i.png", "conversations": [{"from": "human", "value": "<image>\nq"}, {"from": "gpt", "value": "a"}]}]"#,
        "user: <image>\\nq / assistant: a",
    ),
    of(
        "Alpaca",
        "a.json",
        r#"[{"instruction": "<image>q", "input": "more", "output": 3, "history": [["q0", "a0"]], "images": ["i.png"]}]"#,
        "user: q0 / assistant: a0 / user: <image_00>q\\nmore / assistant: 3",
    ),
    of(
        "Alpaca as CSV",
        "a.csv",
        "instruction,output,image\nq,\"a, b\",i.png\n",
        "user: q / assistant: a, b",
    ),
    of(
        "ms-swift, query and response",
        "a.jsonl",
        r#"{"query": "<image>q", "response": "a", "system": "s", "images": ["i.png"]}"#,
        "system: s / user: <image>q / assistant: a",
    ),
    of(
        "question and answer",
        "a.jsonl",
        r#"{"image": "i.png", "question": "q", "answer": 3}"#,
        "user: q / assistant: 3",
    ),
    of(
        "ms-swift, objects",
        "a.jsonl",
        r#"{"messages": [{"role": "user", "content": "<image>Find <ref-object>"}, {"role": "assistant", "content": "<bbox>"}], "images": ["i.png"], "objects": {"ref": ["it"], "bbox": [[1, 0, 2, 1]]}}"#,
        "user: <image>Find it / assistant: [(500,0),(1000,1000)]",
    ),
    of(
        "The Cauldron, rounds",
        "a.jsonl",
        r#"{"images": [{"path": "i.png", "bytes": null}], "texts": [{"user": "q", "assistant": "a"}, {"user": "r", "assistant": "b"}]}"#,
        "user: q / assistant: a / user: r / assistant: b",
    ),
    of(
        "XTuner, rounds",
        "a.json",
        r#"[{"image": "i.png", "conversation": [{"system": "s", "input": "q", "output": "a"}]}]"#,
        "system: s / user: q / assistant: a",
    ),
    of(
        "image folder (Hugging Face), text",
        "metadata.jsonl",
        r#"{"file_name": "i.png", "text": "a"}"#,
        "user:  / assistant: a",
    ),
    of(
        "image folder (Hugging Face), CSV",
        "metadata.csv",
        "file_name,question,answer\ni.png,q,a\n",
        "user: q / assistant: a",
    ),
    of(
        "image in the file, `data:` URI",
        "a.jsonl",
        r#"{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "image": "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGPgOiEHAAHQAPEkXJH0AAAAAElFTkSuQmCC"}"#,
        "user: q / assistant: a",
    ),
    of(
        "Parquet, LLaVA with images in it (snappy)",
        "llava.parquet",
        "",
        "user: <image>\\nq0 / assistant: a0",
    ),
    of(
        "Parquet, The Cauldron with images in it (zstd)",
        "cauldron.parquet",
        "",
        "user: <image_00><image_01>q / assistant: a",
    ),
    of(
        "LLaMA-Factory's dataset_info.json",
        "dataset_info.json#mine",
        r#"{"mine": {"file_name": "turns.json", "formatting": "sharegpt", "columns": {"messages": "talk", "images": "pics"}, "tags": {"role_tag": "who", "content_tag": "says", "user_tag": "u", "assistant_tag": "m"}}}"#,
        "user: <image>q / assistant: a",
    ),
];

/// The file that the entry of `dataset_info.json` names.
const TURNS: &str = r#"[{"talk": [{"who": "u", "says": "<image>q"}, {"who": "m", "says": "a"}], "pics": ["i.png"]}]"#;

fn normal(sample: &RawSample) -> String {
    let turns = sample.conversations.iter();
    let turns = turns.map(|turn| format!("{}: {}", turn.role, turn.content.replace('\n', "\\n")));
    turns.collect::<Vec<_>>().join(" / ")
}

#[test]
fn each_form_of_the_table_loads() {
    let beside = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/forms");
    for example in EXAMPLES {
        let dir = tempfile::tempdir().unwrap();
        image::RgbImage::new(2, 1)
            .save(dir.path().join("i.png"))
            .unwrap();
        fs::write(dir.path().join("turns.json"), TURNS).unwrap();
        let file = example.data.split('#').next().unwrap();
        let data = match example.content {
            "" => beside.join(example.data),
            content => {
                fs::write(dir.path().join(file), content).unwrap();
                dir.path().join(example.data)
            }
        };
        let sets = read_datasets(&data, None, None);
        let sets = sets.unwrap_or_else(|error| panic!("{}: {error}", example.form));
        let first = &sets[0].samples[0];
        assert_eq!(normal(first), example.sample, "{}", example.form);
        assert!(!first.images.is_empty(), "{}", example.form);
        let source = ImageFolder::new(&sets[0].root);
        for (name, path) in &first.images {
            let size = source.load(path).map(|image| image.pixels().len());
            assert!(size.is_ok(), "{} {name}: {size:?}", example.form);
        }
    }
}

#[test]
fn the_table_in_the_documentation_is_the_one_that_loads() {
    let mut table = "| form | file | first sample |\n|---|---|---|\n".to_owned();
    for Example {
        form, data, sample, ..
    } in EXAMPLES
    {
        table.push_str(&format!("| {form} | `{data}` | `{sample}` |\n"));
    }
    let page: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/data-forms.md");
    let text = fs::read_to_string(page).unwrap();
    assert!(text.contains(&table), "docs/data-forms.md lacks:\n{table}");
}
