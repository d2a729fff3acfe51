//! Section with the model's answers before and after training, with images as thumbnails inside the page.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use image::codecs::jpeg::JpegEncoder;
use serde_json::Value;

use super::html::{base64, escape};
use crate::report::{Answer, RunFiles};

/// Maximum number of samples shown on the page.
const MOST_SAMPLES: usize = 24;
/// Maximum number of images shown per sample.
const MOST_IMAGES: usize = 4;
/// Longest side of a thumbnail in pixels.
const SIDE: u32 = 192;
const QUALITY: u8 = 85;

/// HTML section with the generated answers. `None` if the run has no answers.
pub(super) fn section(files: &RunFiles) -> Option<String> {
    let (last_step, last) = files.answers.last()?;
    let first = files.answers.first().filter(|(step, _)| step < last_step);
    let before: BTreeMap<usize, &Answer> = first
        .into_iter()
        .flat_map(|(_, answers)| answers)
        .map(|answer| (answer.index, answer))
        .collect();
    let right = |answers: &[Answer]| answers.iter().filter(|answer| answer.exact).count();
    let mut out = String::from("<section id=\"answers\">\n<h2>Answers</h2>\n<p class=\"soft\">");
    out += &format!(
        "{} of {} exact after step {last_step}",
        right(last),
        last.len()
    );
    if let Some((step, answers)) = first {
        out += &format!(
            ", {} of {} after step {step}",
            right(answers),
            answers.len()
        );
    }
    out += "</p>\n<div class=\"cards\">\n";
    for answer in last.iter().take(MOST_SAMPLES) {
        out += &card(files, answer, before.get(&answer.index).copied());
    }
    out += "</div>\n";
    if last.len() > MOST_SAMPLES {
        out += &format!(
            "<p class=\"soft\">{} more in samples/</p>\n",
            last.len() - MOST_SAMPLES
        );
    }
    Some(out + "</section>\n")
}

fn card(files: &RunFiles, answer: &Answer, before: Option<&Answer>) -> String {
    let mut out = String::from("<div class=\"card\">\n");
    for path in answer.images.iter().take(MOST_IMAGES) {
        out += &match thumbnail(files, path) {
            Some(data) => format!("<img alt=\"image of the sample\" src=\"{data}\" />\n"),
            None => {
                let path = escape(&path.display().to_string());
                format!("<span class=\"missing soft\">{path} cannot be shown</span>\n")
            }
        };
    }
    let name = match &answer.id {
        Value::Null => answer.index.to_string(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    out += &format!("<h3>{}</h3>\n<dl>\n", escape(&name));
    let mut line = |label: &str, class: &str, text: &str| {
        out += &format!(
            "<dt>{label}</dt><dd class=\"{class}\">{}</dd>\n",
            escape(text)
        );
    };
    line("asked", "", &answer.prompt);
    line("right", "", &answer.reference);
    let verdict = |answer: &Answer| if answer.exact { "good" } else { "bad" };
    if let Some(before) = before {
        line("before", verdict(before), &before.answer);
    }
    line("after", verdict(answer), &answer.answer);
    out + "</dl>\n</div>\n"
}

/// An image as a small JPEG in a data URI. `None` if it cannot be found or read.
fn thumbnail(files: &RunFiles, path: &Path) -> Option<String> {
    let path = places(files, path)
        .into_iter()
        .find(|path| path.is_file())?;
    let image = image::ImageReader::open(path).ok()?;
    let image = image.with_guessed_format().ok()?.decode().ok()?;
    let small = if image.width().max(image.height()) > SIDE {
        image.thumbnail(SIDE, SIDE)
    } else {
        image
    };
    let mut bytes = Vec::new();
    JpegEncoder::new_with_quality(&mut bytes, QUALITY)
        .encode_image(&small.to_rgb8())
        .ok()?;
    Some(format!("data:image/jpeg;base64,{}", base64(&bytes)))
}

/// Possible paths of an image: relative to the run directory, or to the data file.
fn places(files: &RunFiles, path: &Path) -> Vec<PathBuf> {
    let mut places = vec![files.directory.join(path)];
    let Some(source) = files.config.as_ref().map(|config| &config["source"]) else {
        return places;
    };
    let named = |kind: &str, name: &str| source[kind][name].as_str().map(Path::new);
    let data = ["eval_data", "data"].map(|name| named("files", name).and_then(Path::parent));
    let directories = data.into_iter().chain([named("demo", "folder")]);
    places.extend(directories.flatten().map(|directory| directory.join(path)));
    places
}
