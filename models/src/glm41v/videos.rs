//! Frames of a video: their size, their times, and the steps of two frames that the tower embeds together.

use super::resize::{ImageLimits, resize_frames};
use crate::data::{Clock, RawVideo};

/// Most frames of a video, those of the published processor.
pub const MAX_FRAMES: usize = 640;
/// Frames per second of a video whose data does not say.
const DEFAULT_RATE: f64 = 24.0;

/// Size (width, height) of the resized frames of a video, in pixels. `None` for an extreme aspect ratio.
///
/// `patch_frames` frames are embedded together. The volume that the limits bound is counted in such steps, rounded
/// half to even.
#[must_use]
pub fn frame_size(
    size: (usize, usize),
    frames: usize,
    patch_frames: usize,
    limits: &ImageLimits,
) -> Option<(usize, usize)> {
    let steps = (frames as f64 / patch_frames as f64).round_ties_even() as usize;
    let limits = ImageLimits { frames, ..*limits };
    resize_frames(size, steps * patch_frames, &limits)
}

/// Seconds from the beginning of the video to the first frame of each step.
///
/// # Errors
/// The number of frames or times is not possible.
pub(super) fn step_seconds(video: &RawVideo, patch_frames: usize) -> Result<Vec<f64>, String> {
    let frames = video.frames.len();
    if frames < patch_frames {
        return Err(format!(
            "{frames} frames, at least {patch_frames} are needed"
        ));
    }
    if frames > MAX_FRAMES {
        return Err(format!("{frames} frames, at most {MAX_FRAMES} are taken"));
    }
    let first = (0..frames).step_by(patch_frames);
    match &video.clock {
        Some(Clock::Groups(_)) => {
            Err("only MiniCPM-V 4.5 groups frames by temporal_ids".to_owned())
        }
        Some(Clock::Seconds(times)) if times.len() != frames => {
            Err(format!("{} times for {frames} frames", times.len()))
        }
        Some(Clock::Seconds(times)) => Ok(first.map(|frame| times[frame]).collect()),
        clock => {
            let rate = match clock {
                Some(Clock::Rate(rate)) => *rate,
                _ => DEFAULT_RATE,
            };
            Ok(first.map(|frame| frame as f64 / rate).collect())
        }
    }
}

/// The time that the prompt states after a step: GLM-4.6V-Flash's text, or GLM-4.1V's whole seconds.
pub(super) fn time_text(seconds: f64, in_tenths: bool) -> String {
    match in_tenths {
        true => format!("{seconds:.1} seconds"),
        false => format!("{:.0}", seconds.trunc()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn video(frames: usize, clock: Option<Clock>) -> RawVideo {
        RawVideo {
            frames: 0..frames,
            clock,
        }
    }

    #[test]
    fn steps_begin_with_every_second_frame() {
        let seconds = |frames, clock| step_seconds(&video(frames, clock), 2);
        assert_eq!(seconds(4, Some(Clock::Rate(2.0))).unwrap(), [0.0, 1.0]);
        assert_eq!(seconds(5, None).unwrap(), [0.0, 2.0 / 24.0, 4.0 / 24.0]);
        let times = Clock::Seconds(vec![0.5, 1.0, 7.25]);
        assert_eq!(seconds(3, Some(times.clone())).unwrap(), [0.5, 7.25]);
        assert!(seconds(2, Some(times)).is_err());
        assert!(seconds(1, None).is_err() && seconds(MAX_FRAMES + 1, None).is_err());
    }

    #[test]
    fn times_round_the_binary_number() {
        let texts =
            |in_tenths| [0.25, 0.35, 1.0, 1.75].map(|seconds| time_text(seconds, in_tenths));
        assert_eq!(
            texts(true),
            ["0.2 seconds", "0.3 seconds", "1.0 seconds", "1.8 seconds"]
        );
        assert_eq!(texts(false), ["0", "0", "1", "1"]);
    }
}
