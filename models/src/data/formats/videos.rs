//! Videos of a sample, as images of their frames: lists of files, or directories.
//!
//! `videos` is a list; each entry is a directory, a list of files, or an object with `frames` (either of these) and
//! `fps`, `times` (seconds) or `temporal_ids` (tenths of seconds in groups). `video` is one such entry.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::entry::{Ignored, Keys};
use super::images::{ENDINGS, path};
use crate::data::raw::Clock;

/// Most frames of a video in the data; a longer list is a mistake.
const MOST_FRAMES: usize = 1 << 14;
/// How to make frames of a film.
const DECODE: &str = "films are not decoded; make frames (mkdir frames; ffmpeg -i FILM -vf fps=2 frames/%05d.png) and give their directory";

/// A video as the data gives it.
pub(super) struct Given {
    pub(super) frames: Vec<PathBuf>,
    pub(super) clock: Option<Clock>,
}

/// Takes the videos of a sample, whose relative paths start at `root`.
///
/// # Errors
/// A value is no video, or its times do not fit its frames.
pub(super) fn take(
    keys: &mut Keys,
    root: &Path,
    ignored: &mut Ignored,
) -> Result<Vec<Given>, String> {
    let Some((key, value)) = keys.take_one_of(&["video", "videos"])? else {
        return Ok(Vec::new());
    };
    let list = match value {
        // A list of texts under `video` is one video's frames; under `videos` each entry is a video.
        Value::Array(list) if key == "videos" => list,
        one => vec![one],
    };
    let videos = list.into_iter().enumerate();
    let videos = videos.map(|(index, video)| {
        one(video, root, ignored)
            .map_err(|reason| keys.refusal(&format!("{key} {index}: {reason}")))
    });
    videos.collect()
}

fn one(video: Value, root: &Path, ignored: &mut Ignored) -> Result<Given, String> {
    if !video.is_object() {
        return Ok(Given {
            frames: frames(video, root)?,
            clock: None,
        });
    }
    let mut keys = Keys::of(video, "")?;
    let listed = keys.take("frames").ok_or("missing field `frames`")?;
    let frames = frames(listed, root)?;
    let clock = match keys.take_one_of(&["fps", "times", "temporal_ids"])? {
        None => None,
        Some(("fps", value)) => Some(Clock::Rate(
            seconds(&value)
                .filter(|rate| *rate > 0.0)
                .ok_or_else(|| format!("\"fps\" is {value}, not a positive number"))?,
        )),
        Some(("times", value)) => Some(Clock::Seconds(times(&value)?)),
        Some((_, value)) => Some(Clock::Groups(groups(&value)?)),
    };
    keys.finish("videos[].", ignored);
    Ok(Given { frames, clock })
}

/// Files of the frames: those of a list in its order, or those of a directory in the order of their names.
fn frames(value: Value, root: &Path) -> Result<Vec<PathBuf>, String> {
    let frames = match &value {
        Value::Array(list) => {
            let paths = list
                .iter()
                .map(|frame| path(frame)?.ok_or_else(|| no_path(frame)));
            paths.collect::<Result<Vec<_>, String>>()?
        }
        Value::String(_) => match path(&value)? {
            Some(named) if root.join(&named).is_dir() => listed(&named, root)?,
            _ => return Err(format!("{value} is no directory of frames: {DECODE}")),
        },
        other => return Err(no_path(other)),
    };
    match frames.len() {
        0 => Err("it has no frames".to_owned()),
        1..=MOST_FRAMES => Ok(frames),
        count => Err(format!("{count} frames, more than {MOST_FRAMES}")),
    }
}

fn no_path(value: &Value) -> String {
    format!("{value} is no path of a frame")
}

fn listed(named: &Path, root: &Path) -> Result<Vec<PathBuf>, String> {
    let unreadable = |error: std::io::Error| format!("{}: {error}", named.display());
    let entries = std::fs::read_dir(root.join(named)).map_err(unreadable)?;
    let names = entries.map(|entry| entry.map(|entry| entry.file_name()));
    let mut names = names.collect::<Result<Vec<_>, _>>().map_err(unreadable)?;
    names.retain(|name| {
        let ending = Path::new(name).extension().unwrap_or_default();
        ENDINGS
            .iter()
            .any(|known| ending.eq_ignore_ascii_case(known))
    });
    names.sort();
    Ok(names.into_iter().map(|name| named.join(name)).collect())
}

fn seconds(value: &Value) -> Option<f64> {
    value
        .as_f64()
        .filter(|time| time.is_finite() && *time >= 0.0)
}

fn times(value: &Value) -> Result<Vec<f64>, String> {
    let list = value.as_array().map(|list| list.iter().map(seconds));
    let times = list.and_then(Iterator::collect::<Option<Vec<f64>>>);
    let times = times.filter(|times| times.is_sorted());
    times.ok_or_else(|| "\"times\" are no seconds in order".to_owned())
}

/// Groups of tenths of seconds; -1 stands for no time, as in the published processor.
fn groups(value: &Value) -> Result<Vec<Vec<Option<u32>>>, String> {
    let tenths = |value: &Value| match value.as_i64()? {
        -1 => Some(None),
        tenths => u32::try_from(tenths).ok().map(Some),
    };
    let group = |value: &Value| {
        value
            .as_array()?
            .iter()
            .map(tenths)
            .collect::<Option<Vec<_>>>()
    };
    let list = value.as_array().map(|list| list.iter().map(group));
    let groups = list.and_then(Iterator::collect::<Option<Vec<_>>>);
    groups.ok_or_else(|| "\"temporal_ids\" are no lists of tenths of seconds".to_owned())
}
