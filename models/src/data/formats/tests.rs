use super::*;
use crate::data::SINGLE_IMAGE;

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
    assert_eq!(DataFormat::from_name("alpaca"), None);
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
            r#"{"messages": [{"role": "user", "content": "<image>"}], "images": []}"#,
            "1 times <image>",
        ),
        (
            Messages,
            good,
            r#"{"messages": [{"role": "user", "content": "q"}], "images": ["a", "b"]}"#,
            "but 2 images",
        ),
        (
            Messages,
            good,
            r#"{"messages": [{"role": "user", "content": "q", "image": "a"}]}"#,
            "format glm4v",
        ),
        (
            Messages,
            good,
            r#"{"messages": [{"role": "user", "content": "q"}], "videos": ["a"]}"#,
            "videos",
        ),
        (
            Messages,
            good,
            r#"{"messages": [{"role": "user"}]}"#,
            "missing field `content`",
        ),
        (
            Messages,
            good,
            r#"{"messages": [{"role": "user", "content": "q"}], "images": [3]}"#,
            "a path or a list",
        ),
        (
            Glm4v,
            good,
            r#"{"messages": [{"role": "user", "content": "q"}], "images": ["a"]}"#,
            "format messages",
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
            r#"{"conversations": [{"from": "tool", "value": "q"}]}"#,
            "\"tool\"",
        ),
        (
            ShareGpt,
            spoken,
            r#"{"conversations": [{"from": "human"}]}"#,
            "missing field `value`",
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
        matches!(&error, DataError::Json { path, line: 2, .. } if path.ends_with("a.json")),
        "{error}"
    );
}

#[test]
fn captcha_images_are_named_after_their_answers() {
    let dir = directory(&[
        ("train/kQ7xZ.png", ""),
        ("train/2024.a.jpg", ""),
        ("test/Ab.JPEG", ""),
        ("test/readme.md", ""),
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
