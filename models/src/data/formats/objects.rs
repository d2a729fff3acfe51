//! Objects of a sample as ms-swift defines them: `<ref-object>` and `<bbox>` stand for entries of lists in order.
//!
//! A box becomes `[(x1,y1),(x2,y2)]` in thousandths of the image's width and height.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::entry::{Ignored, Keys};
use crate::image::{ImageFolder, ImageSource};
use crate::text::Message;

const REF: &str = "<ref-object>";
const BOX: &str = "<bbox>";
/// Parts of a side in which a coordinate is given.
const PARTS: f64 = 1000.0;

/// Replaces the marks of `turns` by the entries of `objects`. `images` are the sample's, below the directory `root`.
///
/// # Errors
/// The lists do not agree with the marks, or the size of an image is unknown.
pub(super) fn place(
    objects: Value,
    images: &[PathBuf],
    root: &Path,
    turns: &mut [Message],
    ignored: &mut Ignored,
) -> Result<(), String> {
    let mut keys = Keys::of(objects, "objects")?;
    let refs = list(&mut keys, "ref")?;
    let refs: Option<Vec<String>> = refs
        .into_iter()
        .map(|name| name.as_str().map(str::to_owned))
        .collect();
    let refs = refs.ok_or("objects: \"ref\" holds something else than texts")?;
    let boxes = list(&mut keys, "bbox")?;
    let scale = Scale::take(&mut keys, images, root)?;
    let boxes: Result<Vec<String>, String> = boxes
        .iter()
        .enumerate()
        .map(|(index, corners)| scale.written(index, corners))
        .collect();
    keys.finish("objects.", ignored);
    replace(REF, refs, turns)?;
    replace(BOX, boxes?, turns)
}

fn list(keys: &mut Keys, key: &str) -> Result<Vec<Value>, String> {
    match keys.take(key) {
        None => Ok(Vec::new()),
        Some(Value::Array(list)) => Ok(list),
        Some(other) => Err(keys.refusal(&format!("{key:?} is {other}, not a list"))),
    }
}

fn replace(mark: &str, entries: Vec<String>, turns: &mut [Message]) -> Result<(), String> {
    let marks = turns.iter().map(|turn| turn.content.matches(mark).count());
    let (marks, count) = (marks.sum::<usize>(), entries.len());
    if marks != count {
        return Err(format!(
            "{marks} times {mark} in the text, but {count} in \"objects\""
        ));
    }
    let mut entries = entries.into_iter();
    for turn in turns {
        let mut pieces = turn.content.split(mark);
        let mut content = pieces.next().unwrap_or_default().to_owned();
        for piece in pieces {
            content.extend(entries.next());
            content.push_str(piece);
        }
        turn.content = content;
    }
    Ok(())
}

/// What the coordinates of boxes are relative to.
struct Scale {
    /// Index of the image of each box; absent entries are 0.
    images: Vec<usize>,
    /// Width and height of each image; none if the coordinates are shares of them.
    sizes: Option<Vec<(f64, f64)>>,
}

impl Scale {
    fn take(keys: &mut Keys, images: &[PathBuf], root: &Path) -> Result<Self, String> {
        let of_boxes: Option<Vec<usize>> = list(keys, "image_id")?
            .iter()
            .map(|id| id.as_u64().map(|id| id as usize))
            .collect();
        let of_boxes = of_boxes.ok_or_else(|| keys.refusal("\"image_id\" holds no indices"))?;
        let stated = [list(keys, "width")?, list(keys, "height")?];
        let sizes = match keys.text("bbox_type")?.as_deref() {
            Some("norm1") => None,
            None | Some("real") if stated.iter().all(|sides| !sides.is_empty()) => {
                let [widths, heights] = stated;
                let sides = widths.iter().zip(&heights);
                let sides = sides.map(|(w, h)| Some((w.as_f64()?, h.as_f64()?)));
                let sides: Option<Vec<_>> = sides.collect();
                Some(sides.ok_or_else(|| keys.refusal("\"width\" or \"height\" is no number"))?)
            }
            None | Some("real") => Some(sizes(images, root)?),
            Some(other) => {
                let reason = format!("\"bbox_type\" is {other:?} instead of real or norm1");
                return Err(keys.refusal(&reason));
            }
        };
        Ok(Self {
            images: of_boxes,
            sizes,
        })
    }

    /// Box `index` with the coordinates `corners` (x, y, x, y, …) as text.
    fn written(&self, index: usize, corners: &Value) -> Result<String, String> {
        let wrong = |reason: &str| format!("objects: box {index} is {corners}: {reason}");
        let numbers: Option<Vec<f64>> = corners
            .as_array()
            .and_then(|corners| corners.iter().map(Value::as_f64).collect());
        let numbers = numbers.ok_or_else(|| wrong("not a list of numbers"))?;
        let (points, []) = numbers.as_chunks::<2>() else {
            return Err(wrong("an odd number of coordinates"));
        };
        let image = self.images.get(index).copied().unwrap_or(0);
        let (width, height) = match &self.sizes {
            None => (1.0, 1.0),
            Some(sizes) => *sizes
                .get(image)
                .ok_or_else(|| wrong(&format!("the sample has no image {image}")))?,
        };
        let part = |value: f64, side: f64| (value / side * PARTS).round_ties_even();
        let points = points
            .iter()
            .map(|[x, y]| format!("({},{})", part(*x, width), part(*y, height)));
        Ok(format!("[{}]", points.collect::<Vec<_>>().join(",")))
    }
}

fn sizes(images: &[PathBuf], root: &Path) -> Result<Vec<(f64, f64)>, String> {
    let source = ImageFolder::new(root);
    let size = |path: &PathBuf| {
        let (width, height) = source
            .dimensions(path)
            .map_err(|error| format!("boxes need the size of an image: {error}"))?;
        Ok((width as f64, height as f64))
    };
    images.iter().map(size).collect()
}
