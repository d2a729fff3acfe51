//! Size of resized images: whole blocks of patches, with an area within limits.

/// Limits on the size to which [`smart_resize`] resizes images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageLimits {
    /// Side, in pixels, of the square of patches that becomes one feature; sides of resized images are
    /// multiples of it.
    pub block: usize,
    /// Number of video frames to which a still image is repeated. The limits below count the pixels of all
    /// frames.
    pub frames: usize,
    /// Smallest number of pixels of the resized image, summed over its frames.
    pub min_pixels: usize,
    /// Largest number of pixels of the resized image, summed over its frames.
    pub max_pixels: usize,
}

/// Largest accepted ratio of an image's longer side to its shorter one.
pub const MAX_ASPECT_RATIO: f64 = 200.0;

/// Size (width, height) in pixels to which an image of `width` x `height` pixels is resized, a whole number
/// of blocks per side. `None` if one side is more than [`MAX_ASPECT_RATIO`] times the other.
#[must_use]
pub fn smart_resize(size: (usize, usize), limits: &ImageLimits) -> Option<(usize, usize)> {
    resize_frames(size, limits.frames, limits)
}

/// As [`smart_resize`], for a video of `limits.frames` frames. Its volume counts `volume_frames` frames when it is
/// compared with the limits.
#[must_use]
pub fn resize_frames(
    (width, height): (usize, usize),
    volume_frames: usize,
    limits: &ImageLimits,
) -> Option<(usize, usize)> {
    let block = limits.block as f64;
    let (mut w, mut h) = (width as f64, height as f64);
    if h < block || w < block {
        let scale = (block / h).max(block / w);
        (w, h) = ((w * scale).trunc(), (h * scale).trunc());
    }
    if w.max(h) / w.min(h) > MAX_ASPECT_RATIO {
        return None;
    }
    let whole = |blocks: f64| blocks as usize * limits.block;
    let nearest = |side: f64| whole((side / block).round_ties_even());
    let (mut wide, mut high) = (nearest(w), nearest(h));
    let pixels = volume_frames * wide * high;
    let (min, max) = (limits.min_pixels as f64, limits.max_pixels as f64);
    if pixels > limits.max_pixels {
        let shrink = (limits.frames as f64 * h * w / max).sqrt();
        let fit = |side: f64| whole((side / shrink / block).floor()).max(limits.block);
        (wide, high) = (fit(w), fit(h));
    } else if pixels < limits.min_pixels {
        let grow = (min / (limits.frames as f64 * h * w)).sqrt();
        let fit = |side: f64| whole((side * grow / block).ceil());
        (wide, high) = (fit(w), fit(h));
    }
    Some((wide, high))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: ImageLimits = ImageLimits {
        block: 28,
        frames: 2,
        min_pixels: 12544,
        max_pixels: 9_633_792,
    };

    #[test]
    fn sizes_halfway_between_blocks_round_to_even() {
        assert_eq!(smart_resize((28 * 10 + 14, 280), &LIMITS), Some((280, 280)));
        assert_eq!(smart_resize((28 * 11 + 14, 280), &LIMITS), Some((336, 280)));
    }

    #[test]
    fn images_are_resized_into_the_pixel_limits() {
        assert_eq!(smart_resize((1, 1), &LIMITS), Some((84, 84)));
        let (w, h) = smart_resize((8000, 4000), &LIMITS).unwrap();
        assert!(2 * w * h <= LIMITS.max_pixels && w % 28 == 0 && h % 28 == 0);
    }

    #[test]
    fn extreme_aspect_ratios_are_refused() {
        assert_eq!(smart_resize((28 * 201, 28), &LIMITS), None);
        assert!(smart_resize((28 * 200, 28), &LIMITS).is_some());
    }
}
