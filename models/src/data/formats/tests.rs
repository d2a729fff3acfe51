use super::*;
use crate::data::{SINGLE_IMAGE, THOUGHTS};

fn file(content: &str) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("data.json");
    std::fs::write(&path, content).unwrap();
    (dir, path)
}

fn read(content: &str) -> Result<Dataset, DataError> {
    read_samples_as(&file(content).1, None)
}

fn read_as(content: &str, format: DataFormat) -> Result<Dataset, DataError> {
    let (_dir, path) = file(content);
    read_samples_as(&path, Some(format))
}

fn turns(sample: &RawSample) -> Vec<(&str, &str)> {
    let turns = sample.conversations.iter();
    turns
        .map(|turn| (turn.role.as_str(), turn.content.as_str()))
        .collect()
}

fn images(sample: &RawSample) -> Vec<(&str, &str)> {
    let images = sample.images.iter();
    images
        .map(|(name, path)| (name.as_str(), path.to_str().unwrap()))
        .collect()
}

#[test]
fn format_names_parse_to_their_formats() {
    for format in DataFormat::ALL {
        assert_eq!(DataFormat::from_name(format.name()), Some(format));
    }
    assert_eq!(DataFormat::from_name("parquet"), None);
}

#[test]
fn the_first_sample_decides_the_format_of_a_file() {
    use DataFormat::{Glm4v, Messages, Minicpm, ShareGpt};
    for (content, format) in [
        (
            r#"[{"conversations": [{"role": "user", "content": "q"}]}]"#,
            Minicpm,
        ),
        (
            r#"{"conversations": [{"from": "human", "value": "q"}]}"#,
            ShareGpt,
        ),
        (
            r#"{"messages": [{"role": "user", "content": "q", "image": "a.png"}]}"#,
            Glm4v,
        ),
        (
            r#"{"messages": [{"role": "user", "content": "q"}], "images": []}"#,
            Messages,
        ),
        (
            r#"{"messages": [{"role": "user", "content": "q"}]}"#,
            Messages,
        ),
        (
            r#"{"messages": [{"role": "user", "content": "q", "image": "a"}], "images": []}"#,
            Glm4v,
        ),
        (
            r#"{"messages": [{"role": "user", "content": "q", "image": null}], "images": ["a"]}"#,
            Messages,
        ),
    ] {
        let (dir, path) = file(content);
        assert_eq!(detect(&path).unwrap(), format, "{content}");
        let dataset = read_samples_as(&path, None).unwrap();
        assert_eq!(
            (dataset.format, dataset.root.as_path()),
            (format, dir.path())
        );
    }
}

#[test]
fn an_unclear_format_is_explained() {
    for (content, part) in [
        (r#"{"text": "a", "label": 3}"#, "fields text, label"),
        ("[3]", "no object"),
        (r#"{"conversations": []}"#, "\"role\" and \"from\""),
        (
            r#"{"conversations": [{"role": "user", "from": "human"}]}"#,
            "\"role\" and \"from\"",
        ),
    ] {
        let error = read(content).unwrap_err();
        assert!(matches!(error, DataError::UnknownFormat { .. }), "{error}");
        assert!(error.to_string().contains(part), "{error}");
    }
    for content in [
        r#"{"messages": [{"image": "a"}], "images": ["b"]}"#,
        r#"{"messages": [], "conversations": []}"#,
    ] {
        let error = read(content).unwrap_err();
        assert!(
            matches!(error, DataError::AmbiguousFormat { .. }),
            "{error}"
        );
    }
    assert!(matches!(read("[]"), Err(DataError::Empty { .. })));
    assert!(matches!(
        detect(Path::new("/nonexistent")),
        Err(DataError::Read { .. })
    ));
}

#[test]
fn glm_4v_messages_carry_their_images() {
    let one = r#"{"id": 4, "messages": [{"role": "user", "content": "q", "image": "a.png"}, {"role": "assistant", "content": "a"}]}"#;
    let none = r#"{"messages": [{"role": "user", "content": "q"}]}"#;
    let later = r#"{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "r", "image": "b.png"}]}"#;
    let dataset = read(&format!("{one}\n{none}\n{later}\n")).unwrap();
    let [one, none, later] = &dataset.samples[..] else {
        panic!("{dataset:?}")
    };
    assert_eq!(one.id.as_deref(), Some("4"));
    assert_eq!(turns(one), [("user", "q"), ("assistant", "a")]);
    assert_eq!(images(one), [(SINGLE_IMAGE, "a.png")]);
    assert_eq!(images(none), []);
    assert_eq!(images(later), [("<image_00>", "b.png")]);
    assert_eq!(turns(later)[2], ("user", "<image_00>r"));
}

#[test]
fn markers_of_an_image_list_become_named_markers() {
    let content = r#"[
        {"messages": [{"role": "user", "content": "A <image> b <image>c"}, {"role": "assistant", "content": "x"},
                      {"role": "user", "content": "<image>"}], "images": ["0.png", "1.png", "2.png"]},
        {"messages": [{"role": "user", "content": "A <image>"}], "images": ["0.png"]},
        {"messages": [{"role": "user", "content": "A"}], "images": "0.png", "system": "be brief"},
        {"messages": [{"role": "user", "content": "A"}], "videos": [], "system": ""}
    ]"#;
    let samples = read(content).unwrap().samples;
    let expected = [
        ("user", "A <image_00> b <image_01>c"),
        ("assistant", "x"),
        ("user", "<image_02>"),
    ];
    assert_eq!(turns(&samples[0]), expected);
    let named = [
        ("<image_00>", "0.png"),
        ("<image_01>", "1.png"),
        ("<image_02>", "2.png"),
    ];
    assert_eq!(images(&samples[0]), named);
    assert_eq!(turns(&samples[1]), [("user", "A <image>")]);
    assert_eq!(images(&samples[1]), [(SINGLE_IMAGE, "0.png")]);
    assert_eq!(turns(&samples[2]), [("system", "be brief"), ("user", "A")]);
    assert_eq!(images(&samples[2]), [(SINGLE_IMAGE, "0.png")]);
    assert_eq!(
        (turns(&samples[3]), images(&samples[3])),
        (vec![("user", "A")], vec![])
    );
}

#[test]
fn sharegpt_speakers_become_roles() {
    let content = r#"[{"id": "x", "conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "<image>q"},
        {"from": "gpt", "value": "a"}], "images": ["0.png"]}, {"conversations": [{"from": "human", "value": "q"}], "image": "1.png"}]"#;
    let samples = read(content).unwrap().samples;
    assert_eq!(
        turns(&samples[0]),
        [("system", "s"), ("user", "<image>q"), ("assistant", "a")]
    );
    assert_eq!(images(&samples[0]), [(SINGLE_IMAGE, "0.png")]);
    assert_eq!(images(&samples[1]), [(SINGLE_IMAGE, "1.png")]);
}

#[test]
fn errors_in_a_sample_are_located() {
    use DataFormat::{Glm4v, Messages, ShareGpt};
    let good = r#"{"messages": [{"role": "user", "content": "q"}]}"#;
    let spoken = r#"{"conversations": [{"from": "human", "value": "q"}]}"#;
    for (format, good, bad, part) in [
        (
            Messages,
            good,
            r#"{"messages": [{"role": "user", "content": "q", "image": "a"}], "images": ["b"]}"#,
            "beside the turns and in a turn",
        ),
        (
            Messages,
            good,
            r#"{"messages": [{"role": "user", "content": "q"}], "videos": ["a"]}"#,
            "videos 0: \"a\" is no directory of frames: films are not decoded",
        ),
        (
            Messages,
            good,
            r#"{"messages": [{"role": "user"}]}"#,
            "turn 0: missing field `content`",
        ),
        (
            Messages,
            good,
            r#"{"messages": [{"role": "user", "content": true}]}"#,
            "turn 0: the content is true",
        ),
        (
            Messages,
            good,
            r#"{"messages": [{"role": "user", "content": "q"}], "images": [3]}"#,
            "\"images\": 3 is no path",
        ),
        (
            Glm4v,
            good,
            r#"{"conversations": []}"#,
            "missing field `messages`",
        ),
        (
            ShareGpt,
            spoken,
            r#"{"conversations": [{"from": 3, "value": "q"}]}"#,
            "\"from\" is 3",
        ),
        (
            ShareGpt,
            spoken,
            r#"{"conversations": [{"from": "human"}]}"#,
            "missing field `content` or `value`",
        ),
    ] {
        for content in [format!("{good}\n\n{bad}\n"), format!("[{good},\n\n{bad}]")] {
            let error = read_as(&content, format).unwrap_err();
            let DataError::Json {
                line: 3, reason, ..
            } = &error
            else {
                panic!("{error}")
            };
            assert!(reason.contains(part), "{error}");
        }
    }
}

/// Reads `sample` as the only one of a file.
fn only(sample: &str) -> Result<(RawSample, Vec<(String, usize)>), String> {
    let mut dataset = read(&sample.replace('\n', " ")).map_err(|error| error.to_string())?;
    Ok((dataset.samples.remove(0), dataset.ignored))
}

#[test]
fn every_spelling_of_an_image_is_read() {
    let turns = r#""messages": [{"role": "user", "content": "<image>q"}, {"role": "assistant", "content": "a"}]"#;
    for (given, path) in [
        (r#""image": "a.png""#, "a.png"),
        (r#""images": ["a.png"]"#, "a.png"),
        (r#""image_path": "a.png""#, "a.png"),
        (r#""img": {"path": "a.png", "bytes": null}"#, "a.png"),
        (r#""images": [{"bytes": "QUJD"}]"#, "data:;base64,QUJD"),
        (
            r#""images": [{"url": "file:///x/a%20b.png"}]"#,
            "/x/a b.png",
        ),
        (
            r#""images": ["data:image/png;base64,QUJD"]"#,
            "data:image/png;base64,QUJD",
        ),
    ] {
        let (sample, ignored) = only(&format!("{{{turns}, {given}}}")).unwrap();
        assert_eq!(images(&sample), [(SINGLE_IMAGE, path)], "{given}");
        assert!(ignored.is_empty(), "{ignored:?}");
    }
    // A file in base64, in one line or in several as Python's encodebytes writes it.
    let lines = "QUJD".repeat(19);
    for between in ["", "\\n"] {
        let given = format!("\"image\": \"{}\"", [&*lines; 4].join(between));
        let (sample, _) = only(&format!("{{{turns}, {given}}}")).unwrap();
        let path = format!("data:;base64,{}", lines.repeat(4));
        assert_eq!(images(&sample), [(SINGLE_IMAGE, &*path)], "{given}");
    }
    let text = turns.replace("<image>", "");
    for given in [
        r#""image": """#,
        r#""images": [""]"#,
        r#""images": []"#,
        r#""image": null"#,
    ] {
        let (sample, _) = only(&format!("{{{text}, {given}}}")).unwrap();
        assert_eq!(images(&sample), [], "{given}");
    }
    for (given, part) in [
        (r#""photo": "a.jpeg""#, "\"photo\" names an image"),
        (
            r#""pics": ["data:image/png;base64,QUJD"]"#,
            "\"pics\" names an image",
        ),
        // A column of images that has a name of its own.
        (
            r#""image_1": {"bytes": "QUJD", "path": null}"#,
            "\"image_1\" names an image",
        ),
        (
            r#""shots": [{"bytes": "QUJD"}]"#,
            "\"shots\" names an image",
        ),
        (
            r#""image": "a", "images": ["b"]"#,
            "\"image\" and \"images\"",
        ),
        (r#""image": "https://x/a.png""#, "not downloaded"),
    ] {
        let error = only(&format!("{{{turns}, {given}}}")).unwrap_err();
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn a_packed_file_is_refused_and_its_program_known() {
    for (bytes, name, tool) in [
        (&b"\x1f\x8b\x08rest"[..], "gzip", "zcat"),
        (b"\x28\xb5\x2f\xfdrest", "zstd", "zstdcat"),
        (b"PK\x03\x04rest", "zip", "unzip -p"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.jsonl.gz");
        std::fs::write(&path, bytes).unwrap();
        let error = read_samples(&path).unwrap_err().to_string();
        assert!(error.contains(&format!("packed with {name}")), "{error}");
        assert_eq!(packing(bytes), Some((name, tool)));
    }
}

/// Tables hold lists as texts.
#[test]
fn turns_in_a_text_are_read() {
    for (key, role, content) in [
        ("messages", "role", "content"),
        ("conversations", "from", "value"),
    ] {
        let turns =
            serde_json::json!([{role: "user", content: "q"}, {role: "assistant", content: "a"}]);
        let sample = serde_json::json!({key: turns.to_string()});
        let set = read(&sample.to_string()).unwrap();
        assert_eq!(turns_of(&set.samples[0]), ["q", "a"]);
    }
    let error = read(r#"{"messages": "[{'role': 'user'}]"}"#).unwrap_err();
    assert!(error.to_string().contains("is no list of turns"), "{error}");
}

/// Roles that published data sets use, in any case.
#[test]
fn every_published_name_of_a_role_is_read() {
    let read = |user: &str, assistant: &str| {
        let (sample, _) = only(&format!(
            r#"{{"conversations": [{{"from": "{user}", "value": "q"}}, {{"from": "{assistant}", "value": "a"}}]}}"#
        ))
        .unwrap();
        let roles: Vec<String> = turns(&sample)
            .iter()
            .map(|turn| turn.0.to_owned())
            .collect();
        roles
    };
    for user in ["user", "human", "prompter", "Human", "USER"] {
        assert_eq!(read(user, "gpt"), ["user", "assistant"], "{user}");
    }
    for assistant in [
        "assistant",
        "gpt",
        "bot",
        "chatbot",
        "chatgpt",
        "bing",
        "bard",
        "model",
        "ai",
        "GPT",
    ] {
        assert_eq!(
            read("human", assistant),
            ["user", "assistant"],
            "{assistant}"
        );
    }
    for system in ["system", "developer", "System"] {
        assert_eq!(read(system, "gpt")[0], "system", "{system}");
    }
    for observed in [
        "observation",
        "tool",
        "tool_response",
        "function",
        "function_response",
    ] {
        assert_eq!(read("human", observed)[1], "observation", "{observed}");
    }
    // The family's rules refuse another name.
    assert_eq!(read("human", "claude")[1], "claude");
}

#[test]
fn images_inside_of_a_text_leave_their_mark() {
    let parts = |parts: &str, beside: &str| {
        only(&format!(
            r#"{{"messages": [{{"role": "user", "content": {parts}}}, {{"role": "assistant", "content": [{{"type": "text", "text": "a"}}]}}]{beside}}}"#
        ))
    };
    for (content, beside) in [
        (
            r#"[{"type": "image_url", "image_url": {"url": "p"}}, {"type": "text", "text": "q"}]"#,
            "",
        ),
        (
            r#"[{"type": "image_url", "value": "p"}, {"type": "text", "value": "q"}]"#,
            "",
        ),
        (
            r#"[{"type": "image", "image": "p"}, {"type": "text", "text": "q"}]"#,
            "",
        ),
        (
            r#"[{"type": "image"}, {"type": "text", "text": "q"}]"#,
            r#", "images": ["p"]"#,
        ),
        (
            r#"[{"type": "image", "source": {"type": "url", "url": "file://p"}}, {"type": "output_text", "text": "q"}]"#,
            "",
        ),
        (r#"[{"image": "p"}, {"text": "q"}]"#, ""),
        (r#""<img>p</img>q""#, ""),
    ] {
        let (sample, _) = parts(content, beside).unwrap();
        assert_eq!(
            turns(&sample),
            [("user", "<image>q"), ("assistant", "a")],
            "{content}"
        );
        assert_eq!(images(&sample), [(SINGLE_IMAGE, "p")]);
    }
    for part in [
        r#"{"type": "image", "base64": "QUJD"}"#,
        r#"{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QUJD"}}"#,
    ] {
        let (sample, ignored) = parts(&format!("[{part}]"), "").unwrap();
        assert_eq!(images(&sample), [(SINGLE_IMAGE, "data:;base64,QUJD")]);
        assert!(ignored.is_empty(), "{ignored:?}");
    }
    let error = parts(
        r#"[{"type": "image", "source": {"type": "file", "file_id": "f"}}]"#,
        "",
    );
    assert!(error.unwrap_err().contains("is no source of an image"));
    let two = r#"[{"type": "image", "path": "a"}, "or", {"type": "image", "path": "b"}]"#;
    let (sample, _) = parts(two, "").unwrap();
    assert_eq!(turns(&sample)[0], ("user", "<image_00>or<image_01>"));
    assert_eq!(images(&sample), [("<image_00>", "a"), ("<image_01>", "b")]);
    for (content, part) in [
        (
            r#"[{"type": "video", "video": "v"}]"#,
            "part 0: parts of the type \"video\"",
        ),
        (r#"[{"type": "text"}]"#, "has no text"),
        (r#"[3]"#, "part 0: 3 is no object"),
    ] {
        let error = parts(content, "").unwrap_err();
        assert!(
            error.contains("turn 0: ") && error.contains(part),
            "{error}"
        );
    }
    let error = only(
        r#"{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "<img>p</img>"}]}"#,
    );
    assert!(error.unwrap_err().contains("an answer holds <img>"));
}

#[test]
fn a_list_of_minicpm_names_its_images_by_number() {
    let sample = |image: &str, text: &str| {
        only(&format!(
            r#"{{"image": {image}, "conversations": [{{"role": "user", "content": "{text}"}}, {{"role": "assistant", "content": "a"}}]}}"#
        ))
        .unwrap()
        .0
    };
    let two = sample(r#"["a", "b"]"#, "<image_00> <image_01>q");
    assert_eq!(images(&two), [("<image_00>", "a"), ("<image_01>", "b")]);
    assert!(images(&sample("[]", "q")).is_empty() && images(&sample("\"\"", "q")).is_empty());
}

#[test]
fn alpaca_and_query_response_are_conversations() {
    let expected = [
        ("user", "p"),
        ("assistant", "r"),
        ("user", "<image_00>q\ni"),
        ("assistant", "a"),
    ];
    let (sample, _) = only(r#"{"instruction": "<image>q", "input": "i", "output": "a", "history": [["p", "r"]], "images": ["x"]}"#).unwrap();
    assert_eq!(turns(&sample), expected);
    assert_eq!(images(&sample), [("<image_00>", "x")]);
    let (sample, _) = only(r#"{"system": "s", "query": "q", "response": "a"}"#).unwrap();
    assert_eq!(
        turns(&sample),
        [("system", "s"), ("user", "q"), ("assistant", "a")]
    );
}

#[test]
fn roles_of_all_trainers_are_known() {
    let (sample, _) = only(r#"{"conversations": [{"from": "user", "value": "q"}, {"from": "function_call", "value": "{\"name\": \"f\", \"arguments\": {\"x\": 1, \"y\": \"é\"}}"},
        {"from": "tool", "value": "3"}, {"from": "gpt", "value": "a"}, {"from": "narrator", "value": "n"}]}"#).unwrap();
    let expected = [
        ("user", "q"),
        ("assistant", "{\"x\": 1, \"y\": \"é\"}"),
        ("observation", "3"),
        ("assistant", "a"),
        ("narrator", "n"),
    ];
    assert_eq!(turns(&sample), expected);
    assert_eq!(sample.conversations[1].metadata, "f");
    let error = only(r#"{"conversations": [{"from": "function_call", "value": "f(x)"}]}"#);
    assert!(error.unwrap_err().contains("is no call"));
}

#[test]
fn marks_of_the_loss_are_kept() {
    let marked = |mark: &str| {
        only(&format!(
            r#"{{"messages": [{{"role": "user", "content": "q"}}, {{"role": "assistant", "content": "a", {mark}}}]}}"#
        ))
    };
    for (mark, unsupervised) in [
        (r#""loss": false"#, true),
        (r#""loss": true"#, false),
        (r#""weight": 0"#, true),
        (r#""weight": 1.0"#, false),
        (r#""train": false"#, true),
        (r#""loss_scale": 0.0"#, true),
        (r#""loss": null"#, false),
    ] {
        let (sample, ignored) = marked(mark).unwrap();
        assert_eq!(sample.conversations[1].unsupervised, unsupervised, "{mark}");
        assert!(ignored.is_empty());
    }
    for (mark, part) in [
        (r#""weight": 0.5"#, "turn 1: \"weight\" is 0.5"),
        (
            r#""train_detail": [{"begin_offset": 0}]"#,
            "turn 1: \"train_detail\" marks parts",
        ),
    ] {
        let error = marked(mark).unwrap_err();
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn keys_without_effect_are_counted_and_dangerous_ones_refused() {
    let turns = r#""messages": [{"role": "user", "content": "q", "name": "x"}, {"role": "assistant", "content": "a", "name": "y"}]"#;
    let (_, ignored) = only(&format!("{{{turns}, \"source\": \"web\", \"empty\": []}}")).unwrap();
    assert_eq!(
        ignored,
        [("source".to_owned(), 1), ("turns[].name".to_owned(), 2)]
    );
    for (given, part) in [
        (r#""label": false"#, "\"label\" is not true"),
        (r#""label": 0"#, "\"label\" is not true"),
        (r#""label": 0.0"#, "\"label\" is not true"),
        (r#""label": "False""#, "\"label\" is not true"),
        (r#""label": "0""#, "\"label\" is not true"),
        (r#""kto_tag": false"#, "\"kto_tag\" is not true"),
        (r#""rejected_response": "b""#, "preference pair"),
        (r#""audio": "x.wav""#, "\"audio\" is not supported"),
        (r#""video": "x.mp4""#, "ffmpeg -i"),
        (r#""tools": "[1]""#, "\"tools\" is not supported"),
        (r#""loss": false"#, "not to train on"),
        (r#""system": 3"#, "\"system\" is 3"),
    ] {
        let error = only(&format!("{{{turns}, {given}}}")).unwrap_err();
        assert!(error.contains(part), "{error}");
    }
    for tools in ["[]", "null", "\"[]\"", "\" null\""] {
        only(&format!("{{{turns}, \"tools\": {tools}}}")).expect(tools);
    }
    for label in ["1", "true", "\"cat\"", "\"true\""] {
        let (_, ignored) = only(&format!("{{{turns}, \"label\": {label}}}")).unwrap();
        assert_eq!(ignored[0], ("label".to_owned(), 1));
    }
    let (marked, ignored) =
        only(r#"{"messages": [{"role": "user", "content": "<video>q"}]}"#).unwrap();
    assert_eq!(turns_of(&marked), ["<video>q"]);
    assert_eq!(ignored, [("<video> in a text".to_owned(), 1)]);
}

#[test]
fn thoughts_of_answers_are_read_and_counted() {
    let read = |role: &str, thought: &str| {
        only(&format!(
            r#"{{"messages": [{{"role": "user", "content": "q"}}, {{"role": "{role}", "content": "a", "reasoning_content": {thought}}}]}}"#
        ))
    };
    for (role, given, thought, count) in [
        ("assistant", r#""Look.""#, Some("Look."), 1),
        ("assistant", r#""""#, Some(""), 0),
        ("assistant", "null", None, 0),
        ("user", r#""Look.""#, None, 1),
    ] {
        let (sample, ignored) = read(role, given).unwrap();
        let found = sample.conversations[1].reasoning_content.as_deref();
        assert_eq!(found, thought, "{role} {given}");
        let counted = [(THOUGHTS.to_owned(), 1)];
        assert_eq!(ignored, counted[..count], "{role} {given}");
    }
    let error = read("assistant", "[1]").unwrap_err();
    assert!(
        error.contains("turn 1: \"reasoning_content\" is [1]"),
        "{error}"
    );
}

#[test]
fn an_unknown_key_may_name_an_image_beside_those_of_the_sample() {
    let turns =
        r#""messages": [{"role": "user", "content": [{"type": "text", "text": "q", "cache": 1}]}]"#;
    let error = only(&format!("{{{turns}, \"mask\": \"m.png\"}}")).unwrap_err();
    assert!(error.contains("\"mask\" names an image"), "{error}");
    for given in [
        r#""mask": "m.png", "image": "a.png""#,
        r#""image_b": "b.png", "image": "a.png""#,
        r#""image_2": {"bytes": "QUJD"}, "image": "a.png""#,
        r#""more": ["a.png", "b.png"], "images": ["a.png"]"#,
    ] {
        let error = only(&format!("{{{turns}, {given}}}")).unwrap_err();
        assert!(
            error.contains("names an image that nothing shows"),
            "{error}"
        );
    }
    // The name and the address of an image that the sample gives.
    let given = r#""file": "a.png", "url": "https://x.y/z.png", "image": "coco/a.png""#;
    let (_, ignored) = only(&format!("{{{turns}, {given}}}")).unwrap();
    let expected = ["file", "turns[].content[].cache", "url"].map(|key| (key.to_owned(), 1));
    assert_eq!(ignored, expected);
}

#[test]
fn a_question_that_names_an_image_file_is_refused() {
    let dir = directory(&[("here.png", ""), ("with space.png", "")]);
    let path = dir.path().join("data.jsonl");
    let read = |sample: String| {
        std::fs::write(&path, sample).unwrap();
        read_samples_as(&path, None).map(|set| set.ignored)
    };
    let asked = |text: &str| {
        let text = serde_json::json!({"prompt": text, "completion": "a"});
        read(text.to_string())
    };
    for text in [
        "gone.png",
        " gone.JPEG\n",
        "![](gone.png)",
        "<img src=\"gone.png\">",
        "![a cat](here.png)\nWhat is this?",
        "![a cat]( with space.png \"A cat\" ) What is this?",
        "What is this? <img width=3 src='here.png'/>",
        "Describe\nhere.png",
        "What is ![](data:image/png;base64,QUJD)?",
    ] {
        let error = asked(text).unwrap_err().to_string();
        assert!(
            error.contains("turn 0: the text names the image"),
            "{text}: {error}"
        );
    }
    let alpaca = r#"{"instruction": "Describe", "input": "here.png", "output": "a"}"#;
    assert!(read(alpaca.to_owned()).is_err());
    let counted = [("name of an image file in a question".to_owned(), 1)];
    for (text, count) in [
        ("Which tag is closed? <img src=\"gone.png\">", 1),
        ("Sort these:\ngone.png", 1),
        ("What does here.png show?", 0),
        ("Open [here](here.png)", 0),
    ] {
        assert_eq!(asked(text).unwrap(), counted[..count], "{text}");
    }
    // Beside an image, and in an answer, a name is text.
    for sample in [
        r#"{"prompt": "![](here.png)", "completion": "a", "image": "here.png"}"#,
        r#"{"prompt": "q", "completion": "here.png"}"#,
    ] {
        assert_eq!(read(sample.to_owned()).unwrap(), []);
    }
}

#[test]
fn marks_of_images_in_other_programs_are_refused_or_counted() {
    let asked = |text: &str, images: &str| {
        only(&format!(
            r#"{{"prompt": "{text}", "completion": "a", "images": {images}}}"#
        ))
    };
    for mark in [
        "<|vision_start|><|image_pad|><|vision_end|>",
        "<|image_1|>",
        "<|image|>",
        "<IMAGE>",
        "<image 1>",
        "<image1>",
    ] {
        let error = asked(&format!("{mark}q"), r#"["p"]"#).unwrap_err();
        assert!(
            error.contains("in a question is plain text"),
            "{mark}: {error}"
        );
        for (text, images) in [
            (format!("{mark}q"), "[]"),
            (format!("<image>What is {mark}?"), r#"["p"]"#),
        ] {
            let (sample, ignored) = asked(&text, images).unwrap();
            assert_eq!(turns_of(&sample)[0], text);
            assert_eq!((ignored.len(), ignored[0].1), (1, 1), "{ignored:?}");
            assert!(ignored[0].0.ends_with("> in a text"), "{ignored:?}");
        }
    }
    let (sample, ignored) = asked("(<image>./</image>)\\nq", r#"["p"]"#).unwrap();
    assert_eq!((turns_of(&sample)[0], ignored.len()), ("<image>\nq", 0));
    let (sample, _) = asked("(<image>./</image>)(<image>./</image>)q", r#"["p", "r"]"#).unwrap();
    assert_eq!(turns_of(&sample)[0], "<image_00><image_01>q");
}

fn turns_of(sample: &RawSample) -> Vec<&str> {
    turns(sample).into_iter().map(|(_, text)| text).collect()
}

#[test]
fn objects_are_written_as_ms_swift_writes_them() {
    let sample = |objects: &str| {
        only(&format!(
            r#"{{"messages": [{{"role": "user", "content": "<image>Find the <ref-object>"}}, {{"role": "assistant", "content": "<bbox><bbox>"}}],
               "images": ["a.png"], "objects": {objects}}}"#
        ).replace('\n', ""))
    };
    let sized = r#"{"ref": ["sheep"], "bbox": [[9, 16, 35, 52], [60, 48, 95, 92]], "width": [100], "height": [200]}"#;
    let (read, _) = sample(sized).unwrap();
    let expected = [
        "<image>Find the sheep",
        "[(90,80),(350,260)][(600,240),(950,460)]",
    ];
    assert_eq!(turns_of(&read), expected);
    let shares =
        r#"{"ref": ["x"], "bbox": [[0.1, 0.2, 0.3, 0.4], [0.5, 0.6]], "bbox_type": "norm1"}"#;
    assert_eq!(
        turns_of(&sample(shares).unwrap().0)[1],
        "[(100,200),(300,400)][(500,600)]"
    );
    for (objects, part) in [
        (
            r#"{"ref": ["x"], "bbox": [[1, 2]]}"#,
            "need the size of an image",
        ),
        (
            r#"{"bbox": [[1, 2], [3, 4]], "bbox_type": "norm1"}"#,
            "1 times <ref-object>",
        ),
        (
            r#"{"ref": ["x"], "bbox": [[1, 2, 3], [3, 4]], "bbox_type": "norm1"}"#,
            "an odd number",
        ),
        (
            r#"{"ref": ["x"], "bbox": [], "points": [[1, 2]], "bbox_type": "norm1"}"#,
            "2 times <bbox>",
        ),
        (r#"[{"caption": "x"}]"#, "objects: "),
    ] {
        let error = sample(objects).unwrap_err();
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn a_backslash_makes_a_mark_plain_text() {
    let (sample, _) = only(r#"{"messages": [{"role": "user", "content": "The \\<image> and \\<image_00> of <image>"}], "images": ["a"]}"#).unwrap();
    assert_eq!(images(&sample), [(SINGLE_IMAGE, "a")]);
    let text = &sample.conversations[0].content;
    assert_eq!(
        (
            text.matches(SINGLE_IMAGE).count(),
            crate::text::literal::shown(text).as_ref()
        ),
        (1, "The <image> and <image_00> of <image>")
    );
}

fn directory(files: &[(&str, &str)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, content) in files {
        let path = dir.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
    }
    dir
}

const LABEL: &str = r#"{"conversations": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}"#;

#[test]
fn a_directory_of_images_and_labels_is_read_in_name_order() {
    let dir = directory(&[
        ("images/b.jpg", ""),
        ("images/a.PNG", ""),
        ("images/notes.txt", ""),
        ("labels_en/a.json", LABEL),
        ("labels_en/b.json", LABEL),
        ("labels_en/.hidden.json", "x"),
    ]);
    for path in [dir.path().to_owned(), dir.path().join("labels_en")] {
        let dataset = read_samples_as(&path, None).unwrap();
        assert_eq!(
            (dataset.format, dataset.root.as_path()),
            (DataFormat::CogvlmSft, dir.path())
        );
        let found: Vec<_> = dataset.samples.iter().flat_map(images).collect();
        assert_eq!(
            found,
            [
                (SINGLE_IMAGE, "images/a.PNG"),
                (SINGLE_IMAGE, "images/b.jpg")
            ]
        );
        assert_eq!(dataset.samples[0].id.as_deref(), Some("a#0"));
        assert_eq!(
            turns(&dataset.samples[0]),
            [("user", "q"), ("assistant", "a")]
        );
    }
}

#[test]
fn labels_and_images_must_match() {
    let read = |files: &[(&str, &str)]| {
        read_samples_as(directory(files).path(), Some(DataFormat::CogvlmSft)).unwrap_err()
    };
    let (a, b) = (("images/a.jpg", ""), ("images/b.jpg", ""));
    let (of_a, of_b) = (("labels_en/a.json", LABEL), ("labels_en/b.json", LABEL));
    assert!(
        matches!(read(&[a, b, of_a]), DataError::NoLabel { image, .. } if image.ends_with("images/b.jpg"))
    );
    assert!(
        matches!(read(&[a, of_a, of_b]), DataError::NoImage { label, .. } if label.ends_with("labels_en/b.json"))
    );
    let error = read(&[a, ("images/b.heic", ""), of_a, of_b]);
    assert!(
        matches!(&error, DataError::OtherImage { image, .. } if image.ends_with("images/b.heic")),
        "{error}"
    );
    let error = read(&[a, of_a, ("labels_zh/a.json", LABEL)]);
    assert!(matches!(error, DataError::AmbiguousFormat { .. }));
    assert!(error.to_string().contains("labels_en and"), "{error}");
    assert!(matches!(read(&[a]), DataError::UnknownFormat { .. }));
    assert!(matches!(read(&[of_a]), DataError::Read { .. }));
    assert!(matches!(
        read(&[("images/x.txt", ""), ("labels_en/x.txt", "")]),
        DataError::Empty { .. }
    ));
    let error = read(&[a, ("labels_en/a.json", "{\"conversations\":\n 3}")]);
    assert!(
        matches!(&error, DataError::Json { path, line: 1, .. } if path.ends_with("a.json")),
        "{error}"
    );
}

#[test]
fn captcha_images_are_named_after_their_answers() {
    let dir = directory(&[
        ("train/kQ7xZ.png", ""),
        ("train/2024.a.jpg", ""),
        ("test/Ab.JPEG", ""),
        ("._x.jpg", ""),
    ]);
    std::os::unix::fs::symlink(dir.path(), dir.path().join("train/circle")).unwrap();
    let dataset = read_samples_as(dir.path(), None).unwrap();
    assert_eq!(
        (dataset.format, dataset.root.as_path()),
        (DataFormat::Captcha, dir.path())
    );
    let found: Vec<_> = dataset
        .samples
        .iter()
        .flat_map(images)
        .map(|(_, path)| path)
        .collect();
    assert_eq!(
        found,
        ["test/Ab.JPEG", "train/2024.a.jpg", "train/kQ7xZ.png"]
    );
    let answers: Vec<_> = dataset
        .samples
        .iter()
        .map(|sample| sample.answer().unwrap())
        .collect();
    assert_eq!(answers, ["Ab", "2024", "kQ7xZ"]);
    assert_eq!(turns(&dataset.samples[0])[0], ("user", "CAPTCHA:"));
}

#[test]
fn a_directory_of_unknown_layout_is_refused_with_a_reason() {
    let dir = directory(&[("notes.txt", "")]);
    assert!(matches!(
        detect(dir.path()),
        Err(DataError::UnknownFormat { .. })
    ));
    let captcha = read_samples_as(dir.path(), Some(DataFormat::Captcha));
    assert!(matches!(captcha, Err(DataError::Empty { .. })));
    let dir = directory(&[("images/a.jpg", "")]);
    assert!(matches!(
        detect(dir.path()),
        Err(DataError::AmbiguousFormat { .. })
    ));
    assert!(read_samples_as(dir.path(), Some(DataFormat::Captcha)).is_ok());
}

#[test]
fn every_round_of_a_conversation_is_a_sample() {
    let rounds: Vec<String> = (0..20)
        .map(|i| format!(r#"{{"role": "user", "content": "q{i}"}}, {{"role": "assistant", "content": "a{i}"}}"#))
        .collect();
    let label = format!(r#"{{"conversations": [{}]}}"#, rounds.join(", "));
    let dir = directory(&[("images/x.jpg", ""), ("labels_en/x.json", &label)]);
    let samples = read_samples_as(dir.path(), None).unwrap().samples;
    let answers: Vec<_> = samples.iter().filter_map(RawSample::answer).collect();
    assert_eq!((answers.len(), answers[7]), (20, "a7"));
    assert_eq!(samples[0].conversations.len(), 2);
    let with_past = samples
        .iter()
        .filter(|s| s.conversations.len() == 4)
        .count();
    assert!((5..=15).contains(&with_past), "{with_past} of 20");
    assert_eq!(samples, read_samples_as(dir.path(), None).unwrap().samples);
}

const TURNS: &str =
    r#""conversations": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]"#;

#[test]
fn every_form_of_id_and_image_is_read() {
    let text = format!(
        r#"[{{"id": 7, "image": "a.png", {TURNS}}},
            {{"id": "x", "image": {{"<image_01>": "b", "<image_00>": "c"}}, {TURNS}, "extra": 1}},
            {{"image": null, {TURNS}}}, {{{TURNS}}}]"#
    );
    let samples = read(&text).unwrap().samples;
    assert_eq!(samples[0].id.as_deref(), Some("7"));
    assert!(samples[0].has_single_image());
    let names: Vec<&str> = samples[1]
        .images
        .iter()
        .map(|(name, _)| name.as_str())
        .collect();
    assert_eq!(names, ["<image_01>", "<image_00>"]);
    assert!(!samples[1].has_single_image());
    assert!(samples[2].images.is_empty() && samples[3].images.is_empty());
    assert_eq!(samples[3].answer(), Some("a"));
}

#[test]
fn json_lines_and_a_byte_order_mark_are_read() {
    let lines = format!("\u{feff}{{\"id\": \"1\", {TURNS}}}\n\n{{\"id\": \"2\", {TURNS}}}\r\n");
    let samples = read(&lines).unwrap().samples;
    assert_eq!(samples[1].id.as_deref(), Some("2"));
}

#[test]
fn errors_in_json_are_located() {
    let list = format!("[{{{TURNS}}},\n\n{{{TURNS}]");
    let lines = format!("{{{TURNS}}}\n\n{{\"id\" 3}}");
    for (text, at) in [(list, 3), (lines, 3)] {
        let error = read_as(&text, DataFormat::Minicpm).unwrap_err();
        let DataError::Json {
            line,
            column,
            reason,
            ..
        } = error
        else {
            panic!("{error}")
        };
        assert_eq!(line, at, "{reason}");
        assert!(column > 0 && !reason.contains("line"));
    }
}

#[test]
fn wrong_fields_are_located_and_explained() {
    for (text, reason) in [
        (r#"[{"id": 1}]"#.to_owned(), "missing field `conversations`"),
        (
            format!("[{{\"image\": 3, {TURNS}}}]"),
            "3 is no path of an image",
        ),
        (
            format!("[{{\"image\": {{\"a\": \"x\", \"a\": \"y\"}}, {TURNS}}}]"),
            "given twice",
        ),
        (
            format!("[{{\"id\": [1], {TURNS}}}]"),
            "id must be a text or a number",
        ),
    ] {
        let error = read_as(&text, DataFormat::Minicpm).unwrap_err();
        assert!(matches!(error, DataError::Json { line: 1, .. }));
        assert!(error.to_string().contains(reason), "{error}");
    }
    let (_dir, path) = file("");
    std::fs::write(&path, b"[{\"id\": \"\xff\"}]").unwrap();
    assert!(matches!(
        read_samples_as(&path, Some(DataFormat::Minicpm)),
        Err(DataError::Json { .. })
    ));
}

#[test]
fn an_empty_or_missing_file_is_an_error() {
    for text in ["", "[]", " \n"] {
        assert!(matches!(read(text), Err(DataError::Empty { .. })));
    }
    let missing = read_samples_as(Path::new("/nonexistent/data.json"), None);
    assert!(matches!(missing, Err(DataError::Read { .. })));
}

#[test]
fn names_of_images_are_answers_only_where_nothing_else_is_there() {
    for (names, part) in [
        (&["0001.jpg", "0002.jpg"][..], "names such as 0001"),
        (&["img1.jpg", "img22.jpg"], "names such as img1"),
        (&["a_b.png", "kQ7x.png"], "names such as a_b"),
        (
            &["kQ7x.png", "notes.csv"],
            "1 images and 1 other files, such as notes.csv",
        ),
        (&["kQ7x.png", "data.json"], "such as data.json"),
    ] {
        let files: Vec<(&str, &str)> = names.iter().map(|name| (*name, "")).collect();
        let dir = directory(&files);
        let error = read_datasets(dir.path(), None, None)
            .unwrap_err()
            .to_string();
        assert!(error.contains(part), "{error}");
        let forced = read_datasets(dir.path(), Some(DataFormat::Captcha), None);
        assert!(forced.is_ok());
    }
}

#[test]
fn a_split_of_a_directory_is_its_files_in_order() {
    let dir = directory(&[("readme.md", "")]);
    let beside = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/forms/llava.parquet");
    std::fs::create_dir(dir.path().join("data")).unwrap();
    for name in [
        "test-00000-of-00001",
        "train-00001-of-00002",
        "train-00000-of-00002",
    ] {
        let path = dir.path().join(format!("data/{name}.parquet"));
        std::fs::copy(&beside, path).unwrap();
    }
    let read = |split: &str| {
        let data = format!("{}{split}", dir.path().display());
        read_datasets(Path::new(&data), None, None)
    };
    let train = read("#train").unwrap();
    let names = train
        .iter()
        .map(|set| set.path.file_name().unwrap().to_str().unwrap());
    let expected = [
        "train-00000-of-00002.parquet",
        "train-00001-of-00002.parquet",
    ];
    assert_eq!(names.collect::<Vec<_>>(), expected);
    assert!(read("").unwrap_err().to_string().contains("#SPLIT"));
    assert!(
        read("#other")
            .unwrap_err()
            .to_string()
            .contains("no Parquet files other-*")
    );
}

#[test]
fn a_weight_follows_a_file() {
    let dir = directory(&[("a.json", LINE), ("b:2", LINE)]);
    let read = |parts: &[&str]| {
        let parts: Vec<String> = parts
            .iter()
            .map(|part| dir.path().join(part).display().to_string())
            .collect();
        read_datasets(Path::new(&parts.join(",")), None, None)
    };
    let sets = read(&["a.json:0.5", "b:2", "a.json"]).unwrap();
    let weights: Vec<f64> = sets.iter().map(|set| set.weight).collect();
    assert_eq!(weights, [0.5, 1.0, 1.0]);
    for wrong in ["a.json:0", "a.json:-1", "a.json:inf"] {
        assert!(
            matches!(read(&[wrong]), Err(DataError::Weight { .. })),
            "{wrong}"
        );
    }
}

#[test]
fn speakers_of_the_known_trainers_have_their_roles() {
    for (word, role) in [
        ("Human", "user"),
        ("USER", "user"),
        ("prompter", "user"),
        ("CHATBOT", "assistant"),
        ("model", "assistant"),
        ("developer", "system"),
        ("function", "observation"),
        ("Narrator", "Narrator"),
    ] {
        let content = format!(r#"{{"conversations": [{{"from": "{word}", "value": "q"}}]}}"#);
        assert_eq!(turns(&read(&content).unwrap().samples[0]), [(role, "q")]);
    }
}

#[test]
fn a_number_is_the_text_that_the_file_has() {
    for (number, text) in [
        ("3", Some("3")),
        ("12.50", Some("12.5")),
        ("1e3", Some("1000.0")),
        ("18446744073709551615", Some("18446744073709551615")),
        ("18446744073709551616", None),
        ("123456789012345678901234567890", None),
        ("-9223372036854775809", None),
        ("0.00001", None),
        ("1e-5", None),
        ("-0", None),
        ("0.0", Some("0.0")),
        ("-0.25", Some("-0.25")),
    ] {
        for sample in [
            format!("{{\"question\": \"q\", \"answer\": {number}}}"),
            format!("{{\"instruction\": \"q\", \"output\": {number}}}"),
        ] {
            match (read(&sample), text) {
                (Ok(set), Some(text)) => assert_eq!(turns(&set.samples[0])[1].1, text),
                (Err(error), None) => assert!(error.to_string().contains("in quotes"), "{error}"),
                (other, _) => panic!("{sample}: {other:?}"),
            }
        }
    }
}

#[test]
fn what_changes_a_question_is_refused() {
    for (sample, part) in [
        (
            r#"{"question": "q", "choices": ["x"], "answer": 0}"#,
            "\"choices\"",
        ),
        (
            r#"{"question": "q", "answer": ["a", "b"]}"#,
            "\"answer\" is",
        ),
        (
            r#"{"question": "q", "answer": ""}"#,
            "missing field `response`",
        ),
        (r#"{"image": "i.png", "text": ["x"]}"#, "\"text\" is"),
        (
            r#"{"texts": [{"user": "q"}]}"#,
            "texts[0]: missing field `assistant`",
        ),
        (r#"{"texts": "q"}"#, "not a list of rounds"),
        (r#"{"texts": [{"assistant": "a"}]}"#, "no question"),
        (r#"{"instruction": "", "output": "a"}"#, "no question"),
        (
            "{\"prompt\": \"q\", \"answer\": \"a\"}\n{\"answer\": \"a\"}",
            "no question and no image",
        ),
        (
            "{\"image\": \"i\", \"text\": \"a\"}\n{\"text\": \"a\"}",
            "no question and no image",
        ),
    ] {
        let error = read(sample).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn images_and_labels_have_one_partner_each() {
    let files = [
        ("images/a.jpg", ""),
        ("images/a.png", ""),
        ("labels/a.json", LABEL),
    ];
    let error = read_datasets(directory(&files).path(), None, None).unwrap_err();
    assert!(
        error.to_string().contains("a.jpg and a.png have one label"),
        "{error}"
    );
    let with_mark = format!("\u{feff}{LABEL}");
    let files = [
        ("images/a.gif", ""),
        ("images/notes.txt", ""),
        ("labels/a.json", &*with_mark),
        ("labels/a.yaml", ""),
    ];
    let set = &read_datasets(directory(&files).path(), None, None).unwrap()[0];
    let ignored: Vec<&str> = set.ignored.iter().map(|(name, _)| &**name).collect();
    assert_eq!(ignored, ["images/*.txt", "labels *.yaml"]);
    assert_eq!(images(&set.samples[0]), [(SINGLE_IMAGE, "images/a.gif")]);
}

#[test]
fn a_label_may_describe_its_image() {
    let read = |label: &str| {
        let files = [("images/a.jpg", ""), ("labels/a.json", label)];
        let mut sets = read_datasets(directory(&files).path(), None, None)?;
        Ok::<_, DataError>(sets.remove(0))
    };
    let set = read(r#"{"captions": [{"role": "caption", "content": "A beach."}]}"#).unwrap();
    assert_eq!(set.format, DataFormat::CogvlmSft);
    assert_eq!(
        turns(&set.samples[0]),
        [("user", ""), ("assistant", "A beach.")]
    );
    for label in [
        r#"{"captions": []}"#,
        r#"{"captions": [{"role": "user", "content": "x"}]}"#,
        r#"{"captions": [{"role": "caption"}]}"#,
        r#"{"captions": [{"role": "caption", "content": "x"}, {"role": "caption", "content": "y"}]}"#,
    ] {
        let error = read(label).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("\"captions\""), "{label}: {error}");
    }
}

const LINE: &str =
    r#"{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}"#;

#[test]
fn files_with_samples_in_a_directory_come_first() {
    let named = LINE.replacen('{', r#"{"file_name": "0001.jpg", "#, 1);
    let all = |dir: &tempfile::TempDir| read_datasets(dir.path(), None, None);
    let dir = directory(&[("0001.jpg", ""), ("metadata.jsonl", &named)]);
    let found = all(&dir).unwrap();
    assert_eq!(images(&found[0].samples[0]), [(SINGLE_IMAGE, "0001.jpg")]);
    assert_eq!(
        (&found[0].path, &found[0].root),
        (&dir.path().join("metadata.jsonl"), &dir.path().to_owned())
    );
    let captions = directory(&[
        ("train/0001.jpg", ""),
        ("train/metadata.csv", "file_name,text\n0001.jpg,x\n"),
    ]);
    let found = all(&captions).unwrap();
    let expected = [("user", ""), ("assistant", "x")];
    assert_eq!(turns(&found[0].samples[0]), expected);
    assert_eq!(found[0].root, captions.path().join("train"));
    let dir = directory(&[
        ("sft/images/a.jpg", ""),
        ("sft/labels_en/a.json", LABEL),
        ("x.png", ""),
    ]);
    let found = all(&dir).unwrap();
    assert_eq!(
        (found[0].format, &found[0].root),
        (DataFormat::CogvlmSft, &dir.path().join("sft"))
    );
    let both = directory(&[("train.json", LINE), ("train.jsonl", LINE)]);
    assert!(matches!(all(&both), Err(DataError::AmbiguousFormat { .. })));
}

#[test]
fn several_files_and_entries_of_dataset_info_are_read_in_order() {
    let info = r#"{"mine": {"file_name": "odd.json", "formatting": "sharegpt", "extra": 1, "columns": {"messages": "talk", "images": "pics"},
          "tags": {"role_tag": "who", "content_tag": "says", "user_tag": "Q", "assistant_tag": "A"}},
        "plain": {"file_name": "alpaca.json", "columns": {"prompt": "ask", "response": "reply"}},
        "some": {"file_name": "odd.json", "formatting": "sharegpt", "num_samples": 3},
        "none": {"file_name": "odd.json", "num_samples": 0}, "far": {"cloud_file_name": "s3://x"}, "pairs": {"file_name": "odd.json", "ranking": true}}"#;
    let odd = r#"[{"talk": [{"who": "Q", "says": "<image>q"}, {"who": "A", "says": "a"}], "pics": ["x.png"], "note": "n"}]"#;
    let dir = directory(&[
        ("dataset_info.json", info),
        ("odd.json", odd),
        ("alpaca.json", r#"[{"ask": "q", "reply": "r"}]"#),
        ("b.jsonl", LINE),
    ]);
    let at = |name: &str| dir.path().join(name).display().to_string();
    let read = |data: &str| read_datasets(Path::new(data), None, Some(Path::new("/pictures")));
    let info = at("dataset_info.json");
    let found = read(&format!("{info}#mine,{info}#plain,{}", at("b.jsonl"))).unwrap();
    assert_eq!(
        turns(&found[0].samples[0]),
        [("user", "<image>q"), ("assistant", "a")]
    );
    assert_eq!(images(&found[0].samples[0]), [(SINGLE_IMAGE, "x.png")]);
    assert_eq!(
        found[0].ignored,
        [("note".to_owned(), 1), ("mine.extra".to_owned(), 1)]
    );
    assert_eq!(
        turns(&found[1].samples[0]),
        [("user", "q"), ("assistant", "r")]
    );
    assert_eq!(found[2].path, dir.path().join("b.jsonl"));
    assert!(found.iter().all(|set| set.root == Path::new("/pictures")));
    for (data, part) in [
        (info.clone(), "mine, plain, some, none, far, pairs"),
        (format!("{info}#other"), "no data set \"other\""),
        (format!("{info}#none"), "not a number above 0"),
        (format!("{info}#far"), "not downloaded"),
        (format!("{info}#pairs"), "preference pairs"),
    ] {
        let error = read(&data).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
    // A column that the entry names comes before one that the reader would take, in any order of the file.
    let both = [
        r#"[{"instruction": "x", "ask": "q", "reply": "r", "output": "y"}]"#,
        r#"[{"ask": "q", "instruction": "x", "output": "y", "reply": "r"}]"#,
    ];
    for text in both {
        std::fs::write(dir.path().join("alpaca.json"), text).unwrap();
        let found = &read(&format!("{info}#plain")).unwrap()[0];
        assert_eq!(
            turns(&found.samples[0]),
            [("user", "q"), ("assistant", "r")]
        );
        let named = |key: &str| (format!("{key} (another column is named)"), 1);
        assert_eq!(found.ignored, [named("instruction"), named("output")]);
    }
    // A column that no sample has.
    for (text, stated) in [
        (r#"[{"ask": "q", "out": "r"}]"#, r#""reply" as "response""#),
        (
            r#"[{"instruct": "q", "reply": "r"}]"#,
            r#""ask" as "prompt""#,
        ),
    ] {
        std::fs::write(dir.path().join("alpaca.json"), text).unwrap();
        let error = read(&format!("{info}#plain")).unwrap_err().to_string();
        let part = format!("alpaca.json:1:1: dataset_info.json states the column {stated}");
        assert!(error.contains(&part), "{error}");
    }
    let text = r#"[{"ask": "q", "reply": "r"}, {"ask": null, "reply": "r"}]"#;
    std::fs::write(dir.path().join("alpaca.json"), text).unwrap();
    let error = read(&format!("{info}#plain")).unwrap_err().to_string();
    assert!(error.contains("no question and no image"), "{error}");
    let both = r#"[{"pics": [], "messages": [], "talk": [{"who": "Q", "says": "q", "role": "A", "content": "x"}, {"role": "Q", "who": "A", "says": "a"}], "conversations": []}]"#;
    std::fs::write(dir.path().join("odd.json"), both).unwrap();
    let found = &read(&format!("{info}#mine")).unwrap()[0];
    assert_eq!(
        turns(&found.samples[0]),
        [("user", "q"), ("assistant", "a")]
    );
    // An epoch takes three samples, twice as many with a weight of 2.
    let two = dir.path().join("odd.json");
    let turns =
        r#"{"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}"#;
    std::fs::write(&two, format!("[{turns}, {turns}]")).unwrap();
    let some = read(&format!("{info}#some,{info}#some:2")).unwrap();
    assert_eq!((some[0].weight, some[1].weight), (1.5, 3.0));
    // ms-swift's way: a file and a number of samples.
    let path = two.display();
    let some = read(&format!("{path}#1,{path}#5:2")).unwrap();
    assert_eq!((some[0].weight, some[1].weight), (0.5, 5.0));
    assert_eq!(some[0].path, two);
    assert_eq!(
        data_files(Path::new(&format!("{path}#1"))),
        std::slice::from_ref(&two)
    );
    for none in ["#0", "#x", "#-1"] {
        let error = read(&format!("{path}{none}")).unwrap_err();
        assert!(matches!(error, DataError::Read { .. }), "{none}: {error}");
    }
    std::fs::write(&two, odd).unwrap();
    let bare = format!("{info}#mine");
    let roots = read_datasets(Path::new(&bare), None, None).unwrap();
    assert_eq!(roots[0].root, dir.path());
}
