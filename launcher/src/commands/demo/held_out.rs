//! Held-out images of the repository, embedded in the executable.

macro_rules! images {
    ($($name:literal)*) => {
        [$((concat!($name, ".png"), include_bytes!(concat!("../../../demo/heldout/", $name, ".png")).as_slice())),*]
    };
}

/// File name and contents of every held-out image.
#[rustfmt::skip]
pub(super) const IMAGES: [(&str, &[u8]); super::HELD_OUT_SAMPLES] = images! {
    "0000" "0001" "0002" "0003" "0004" "0005" "0006" "0007" "0008" "0009" "0010" "0011"
    "0012" "0013" "0014" "0015" "0016" "0017" "0018" "0019" "0020" "0021" "0022" "0023"
    "0024" "0025" "0026" "0027" "0028" "0029" "0030" "0031" "0032" "0033" "0034" "0035"
    "0036" "0037" "0038" "0039" "0040" "0041" "0042" "0043" "0044" "0045" "0046" "0047"
    "0048" "0049" "0050" "0051" "0052" "0053" "0054" "0055" "0056" "0057" "0058" "0059"
    "0060" "0061" "0062" "0063" "0064" "0065" "0066" "0067" "0068" "0069" "0070" "0071"
    "0072" "0073" "0074" "0075" "0076" "0077" "0078" "0079" "0080" "0081" "0082" "0083"
    "0084" "0085" "0086" "0087" "0088" "0089" "0090" "0091" "0092" "0093" "0094" "0095"
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::demo::dataset;

    /// To generate them again: `cargo run -p launcher --example draw_heldout`.
    #[test]
    fn the_committed_images_are_those_of_the_generator() {
        for (sample, (name, bytes)) in dataset::held_out().zip(IMAGES) {
            assert_eq!(sample.to_json("held")["image"], format!("held/{name}"));
            assert!(
                sample.png() == bytes,
                "{name} differs from what the generator draws"
            );
        }
    }
}
