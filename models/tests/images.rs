//! Images of the golden packs: decoded and resized bytes have the hashes of the reference.

#![allow(clippy::unwrap_used, reason = "helpers of a test binary")]

use std::fmt::Write;
use std::path::{Path, PathBuf};

use models::image::{RgbImage, decode, resize};
use safetensors::SafeTensors;
use serde_json::Value;
use sha2::{Digest, Sha256};

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden")
}

fn hash(image: &RgbImage) -> String {
    let digest = Sha256::digest(image.pixels());
    digest.iter().fold(String::new(), |mut out, byte| {
        write!(out, "{byte:02x}").unwrap();
        out
    })
}

/// The image of a case; a sample without one gets a black image of 224 x 224 pixels.
fn image(case: &Path) -> RgbImage {
    let path = case.join("image_0.png");
    if path.exists() {
        decode(&path).unwrap()
    } else {
        RgbImage::new(224, 224, vec![0; 224 * 224 * 3])
    }
}

#[test]
fn decoded_and_resized_images_have_the_hashes_of_the_reference() {
    let pack = golden().join("glm-4v-9b");
    let hashes = std::fs::read(pack.join("image_hashes.json")).unwrap();
    let hashes: Value = serde_json::from_slice(&hashes).unwrap();
    let cases = hashes.as_object().unwrap();
    assert_eq!(cases.len(), 4);
    for (case, expected) in cases {
        let image = image(&pack.join("cases").join(case));
        assert_eq!(
            expected["size"],
            serde_json::json!([image.width(), image.height()])
        );
        assert_eq!(expected["rgb"], hash(&image), "{case}");
        for side in [224, 1120] {
            let resized = resize(&image, side, side);
            assert_eq!(
                expected[format!("bicubic_{side}")],
                hash(&resized),
                "{case} {side}"
            );
        }
    }
}

#[test]
fn images_resized_for_the_model_equal_those_of_the_golden_cases() {
    let mut compared = 0;
    for name in ["glm-4v-9b", "glm-4.1v-9b-thinking"] {
        for case in std::fs::read_dir(golden().join(name).join("cases")).unwrap() {
            let case = case.unwrap().path();
            let bytes = std::fs::read(case.join("expected.safetensors")).unwrap();
            let tensors = SafeTensors::deserialize(&bytes).unwrap();
            for (tensor, file) in [
                ("resized_u8", "image_0.png"),
                ("resized_u8.0", "image_0.png"),
                ("resized_u8.1", "image_1.png"),
            ] {
                let Ok(expected) = tensors.tensor(tensor) else {
                    continue;
                };
                let &[height, width, 3] = expected.shape() else {
                    panic!("{case:?}: {:?}", expected.shape())
                };
                let image = if file == "image_0.png" {
                    image(&case)
                } else {
                    decode(&case.join(file)).unwrap()
                };
                assert_eq!(
                    resize(&image, width, height).pixels(),
                    expected.data(),
                    "{case:?}"
                );
                compared += 1;
            }
        }
    }
    assert!(compared >= 7, "{compared} pictures");
}
