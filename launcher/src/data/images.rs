//! Check of the images that samples name, before training.
//!
//! It reads the beginning and the end of each file, which tell its size and whether it was cut short. It decodes the
//! files whose end does not tell that, and the first images up to [`DECODED_PIXELS`] in all, which finds files that a
//! tool damaged as a rule. It decodes all of them if samples with damaged images are to be found or skipped. Damage
//! that it does not find ends training, with the name of the file. Verdicts are remembered, see `verdict_cache`.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use models::data::RawSample;
use models::image::budget::MACHINE_BYTES;
use models::image::{DecodeBudget, Header, ImageError, ImageFolder, ImageSource, short_path};
use rayon::prelude::*;

use super::verdict_cache::{Stamp, Verdict, Verdicts};
use crate::config::RunConfig;
use crate::error::{ErrorCode, Failure};
use crate::lang::{Both, Text, both, text};
use crate::memory;
use crate::rank_env::Variables;
use crate::units::{bytes, grouped};

/// Pixels of the images that are decoded in every check: about one second of one core.
const DECODED_PIXELS: u64 = 100_000_000;
/// Images that are looked at between two looks at the clock.
const AT_ONCE: usize = 256;
/// Time between two lines of progress.
const PROGRESS: Duration = Duration::from_secs(5);
/// Directory of verdicts in the cache directory.
const DIRECTORY: &str = "images";

/// How images are checked.
pub(crate) struct ImageCheck<'a> {
    /// Directory in which verdicts are remembered, if any.
    pub(crate) cache: Option<PathBuf>,
    /// Whether all images are decoded.
    pub(crate) decode_all: bool,
    /// Host memory that the decoding of one image may take, in bytes.
    pub(crate) memory_bytes: u64,
    /// Time between two lines of progress.
    pub(crate) every: Duration,
    /// Shows a line of progress.
    pub(crate) show: &'a mut dyn FnMut(Text),
}

impl<'a> ImageCheck<'a> {
    /// Check on this machine, which remembers verdicts in the user's cache directory. It does not trust the directory
    /// for temporary files, which users share.
    pub(crate) fn here(show: &'a mut dyn FnMut(Text)) -> Self {
        let variables = Variables::read();
        let is_set = |name: &&str| variables.get(name).is_some_and(|value| !value.is_empty());
        let own = ["XDG_CACHE_HOME", "HOME"].iter().any(is_set);
        Self {
            cache: own.then(|| variables.cache_dir().join(DIRECTORY)),
            decode_all: false,
            memory_bytes: memory::host().free_bytes,
            every: PROGRESS,
            show,
        }
    }
}

/// The image that takes the most memory while it is decoded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LargestImage {
    pub(crate) path: PathBuf,
    pub(crate) size: (usize, usize),
    /// Bytes from reading the file to resizing its image.
    pub(crate) bytes: u64,
}

impl LargestImage {
    /// Text such as `a.jpg, 6000 x 4000 pixels, takes 80.0M while it is decoded`.
    pub(crate) fn describe(&self) -> Text {
        let (width, height) = self.size;
        let path = self.path.display();
        let taken = bytes(self.bytes);
        text!(
            "{path}, {width} x {height} pixels, takes {taken} while it is decoded",
            "{path}，{width} x {height} 像素，解码时占用 {taken}"
        )
    }
}

/// Bytes that each process of a run may hold of images being decoded: its share of the machine's budget.
pub(crate) fn decode_share(config: &RunConfig) -> u64 {
    MACHINE_BYTES / config.ranks_here().max(1) as u64
}

/// Gives this process its share of the machine's budget for decoding.
pub(super) fn share_budget(config: &RunConfig) {
    DecodeBudget::of_process().resize(decode_share(config));
}

/// An image as it was found.
struct Seen {
    path: PathBuf,
    /// File and its stamp; `None` for an image inside the data file.
    file: Option<(PathBuf, Stamp)>,
    header: Result<Header, ImageError>,
    /// Whether its content was decoded without an error.
    decoded: bool,
    /// Whether a remembered verdict told this.
    known: bool,
}

/// Checks the images of `samples`. Returns `source` with the headers of all images, and the largest image.
///
/// # Errors
/// An image is too large for the memory (exit 5). Other problems are in the headers.
pub(crate) fn check(
    samples: &[RawSample],
    source: &ImageFolder,
    data: &Path,
    check: &mut ImageCheck<'_>,
) -> Result<(ImageFolder, Option<LargestImage>), Failure> {
    let started = SystemTime::now();
    let mut verdicts = Verdicts::of(check.cache.as_deref(), data);
    let mut named = HashSet::new();
    let all = samples.iter().flat_map(|sample| &sample.images);
    let paths: Vec<&PathBuf> = all
        .map(|(_, path)| path)
        .filter(|path| named.insert(*path))
        .collect();
    let mut seen = Vec::with_capacity(paths.len());
    in_parts(
        &paths,
        both("read the headers of", "已读取文件头的图片"),
        check,
        |part| {
            seen.par_extend(part.par_iter().map(|path| look(path, source, &verdicts)));
        },
    );
    let largest = largest(&seen, source);
    if let Some(image) = largest
        .as_ref()
        .filter(|image| image.bytes > check.memory_bytes)
    {
        return Err(too_large(image, check.memory_bytes));
    }
    let wanted = to_decode(&seen, check.decode_all);
    let mut failed = Vec::new();
    in_parts(
        &wanted,
        both("decoded", "已解码的图片"),
        check,
        |part| {
            let errors = part.par_iter().map(|i| source.load(&seen[*i].path).err());
            failed.extend(errors.collect::<Vec<_>>());
        },
    );
    for (i, error) in wanted.into_iter().zip(failed) {
        seen[i].known = false;
        match error {
            None => seen[i].decoded = true,
            Some(error) => seen[i].header = Err(error),
        }
    }
    for image in seen.iter().filter(|image| !image.known) {
        if let (Some((file, stamp)), Ok(header)) = (&image.file, image.header.clone()) {
            let decoded = image.decoded;
            let verdict = Verdict {
                stamp: *stamp,
                header,
                decoded,
            };
            verdicts.remember(file.clone(), verdict, started);
        }
    }
    verdicts.save();
    let headers = seen.into_iter().map(|image| (image.path, image.header));
    Ok((source.clone().with_headers(headers.collect()), largest))
}

/// The image at `path`, from its remembered verdict or its file.
fn look(path: &Path, source: &ImageFolder, verdicts: &Verdicts) -> Seen {
    let seen = |file, header, decoded, known| Seen {
        path: path.to_owned(),
        file,
        header,
        decoded,
        known,
    };
    let stamped = source.file(path).and_then(|file| {
        let stamp = Stamp::of(&file)?;
        Some((file, stamp))
    });
    if let Some((file, stamp)) = &stamped
        && let Some(known) = verdicts.of_file(file, *stamp)
    {
        return seen(stamped, Ok(known.header), known.decoded, true);
    }
    seen(stamped, source.header(path), false, false)
}

/// Indices of the images that are decoded, see the module.
fn to_decode(seen: &[Seen], all: bool) -> Vec<usize> {
    let mut pixels = 0;
    let wanted = seen.iter().enumerate().filter(|(_, image)| {
        let Ok(header) = &image.header else {
            return false;
        };
        pixels += header.pixels();
        let wanted = all || !header.is_whole || pixels <= DECODED_PIXELS;
        wanted && !image.decoded
    });
    wanted.map(|(i, _)| i).collect()
}

fn largest(seen: &[Seen], source: &ImageFolder) -> Option<LargestImage> {
    let usable = seen
        .iter()
        .filter_map(|image| Some((image, image.header.as_ref().ok()?)));
    let (image, header) = usable.max_by_key(|(_, header)| source.decode_bytes(header))?;
    Some(LargestImage {
        path: short_path(&image.path),
        size: header.size(false),
        bytes: source.decode_bytes(header),
    })
}

fn too_large(image: &LargestImage, memory_bytes: u64) -> Failure {
    Failure::new(
        ErrorCode::Plan,
        text!(
            "the image {} does not fit into host memory",
            "主机内存放不下图片 {}",
            image.path.display()
        ),
        text!(
            "{}, {} are available",
            "{}，可用 {}",
            image.describe(),
            bytes(memory_bytes)
        ),
    )
    .next(both(
        "make the image smaller; the model sees a resized copy",
        "请缩小图片；模型看到的是缩放后的副本",
    ))
    .next(both(
        "use a machine with more memory, or free memory",
        "请使用内存更大的机器，或释放内存",
    ))
}

/// Calls `work` with parts of `items`, and shows how many are done if that takes long.
fn in_parts<T>(items: &[T], done: Both, check: &mut ImageCheck<'_>, mut work: impl FnMut(&[T])) {
    let (mut shown, mut count) = (Instant::now(), 0);
    for part in items.chunks(AT_ONCE) {
        work(part);
        count += part.len();
        if shown.elapsed() >= check.every && count < items.len() {
            shown = Instant::now();
            let [count, all] = [count, items.len()].map(|n| grouped(n as u64));
            (check.show)(text!(
                "{done} {count} of {all} images",
                "{done}：{count} / {all}"
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    struct Site {
        dir: tempfile::TempDir,
    }

    /// Result of a check: headers that are errors, lines of progress, and the largest image.
    struct Checked {
        bad: Vec<String>,
        largest: LargestImage,
    }

    impl Site {
        fn new(images: usize) -> Self {
            let dir = tempfile::tempdir().expect("a directory");
            let site = Self { dir };
            for i in 0..images {
                site.draw(i, 20 + i as u32);
            }
            site
        }

        fn path(&self, i: usize) -> PathBuf {
            self.dir.path().join(format!("{i}.png"))
        }

        /// Draws image `i`, with a time long ago.
        fn draw(&self, i: usize, width: u32) {
            let image =
                image::RgbImage::from_fn(width, 30, |x, y| image::Rgb([x as u8, y as u8, 7]));
            image.save(self.path(i)).expect("drawn");
            self.set_time(i, 1000);
        }

        fn set_time(&self, i: usize, seconds: u64) {
            let time = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
            let file = fs::File::options()
                .write(true)
                .open(self.path(i))
                .expect("opened");
            file.set_modified(time).expect("set");
        }

        /// Changes a byte of the pixels and keeps the size and the time.
        fn damage(&self, i: usize) {
            let mut bytes = fs::read(self.path(i)).expect("read");
            let middle = bytes.len() / 2;
            bytes[middle] ^= 0x55;
            fs::write(self.path(i), bytes).expect("written");
            self.set_time(i, 1000);
        }

        fn cache(&self) -> PathBuf {
            self.dir.path().join("cache")
        }

        fn check_with(&self, images: usize, memory_bytes: u64) -> Result<Checked, Failure> {
            let samples: Vec<RawSample> = (0..images)
                .map(|i| RawSample {
                    images: vec![("<image>".into(), format!("{i}.png").into())],
                    ..RawSample::default()
                })
                .collect();
            let source = ImageFolder::new(self.dir.path());
            let mut check = ImageCheck {
                cache: Some(self.cache()),
                decode_all: true,
                memory_bytes,
                every: Duration::ZERO,
                show: &mut |_| (),
            };
            let data = self.dir.path().join("data.json");
            let (source, largest) = super::check(&samples, &source, &data, &mut check)?;
            let bad = samples.iter().filter_map(|sample| {
                let (_, path) = &sample.images[0];
                source.header(path).err().map(|error| error.to_string())
            });
            Ok(Checked {
                bad: bad.collect(),
                largest: largest.expect("an image"),
            })
        }

        fn check(&self, images: usize) -> Checked {
            self.check_with(images, u64::MAX).expect("checked")
        }
    }

    #[test]
    fn verdicts_are_remembered_until_size_or_time_change() {
        let site = Site::new(3);
        assert_eq!(site.check(3).bad, Vec::<String>::new());
        // Damage that neither size nor time show is not looked for again.
        site.damage(1);
        assert_eq!(site.check(3).bad, Vec::<String>::new());
        site.set_time(1, 2000);
        let bad = site.check(3).bad;
        assert!(bad.len() == 1 && bad[0].contains("1.png"), "{bad:?}");
        // A problem is looked at in each check.
        assert_eq!(site.check(3).bad.len(), 1);
        site.draw(1, 50);
        let checked = site.check(3);
        assert!(checked.bad.is_empty());
        assert_eq!(checked.largest.size, (50, 30));
    }

    #[test]
    fn a_broken_or_older_file_of_verdicts_is_ignored_and_written_again() {
        let site = Site::new(2);
        site.check(2);
        let file = || {
            fs::read_dir(site.cache())
                .expect("a cache")
                .next()
                .expect("a file")
        };
        let file = file().expect("readable").path();
        let good = fs::read_to_string(&file).expect("text");
        site.damage(0);
        let other = good.replacen(env!("CARGO_PKG_VERSION"), "0.0.0-other", 1);
        for text in [&other, "", "{", "[]", &good[..good.len() / 2]] {
            fs::write(&file, text).expect("written");
            assert_eq!(site.check(2).bad.len(), 1, "{text}");
            let written = fs::read_to_string(&file).expect("text");
            assert!(
                written.contains("1.png") && !written.contains("0.png"),
                "{written}"
            );
        }
        let names = fs::read_dir(site.cache()).expect("a cache").count();
        assert_eq!(names, 1, "no file in the making stays");
    }

    #[test]
    fn a_file_that_changes_during_the_check_is_not_remembered() {
        let site = Site::new(2);
        let now = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .expect("later");
        site.set_time(0, now.as_secs() + 10);
        site.check(2);
        let stamp = |i: usize| Stamp::of(&site.path(i)).expect("a file");
        let data = site.dir.path().join("data.json");
        let verdicts = Verdicts::of(Some(&site.cache()), &data);
        let real = |i: usize| site.path(i).canonicalize().expect("a file");
        assert!(verdicts.of_file(&real(0), stamp(0)).is_none());
        assert!(verdicts.of_file(&real(1), stamp(1)).is_some());
    }

    #[test]
    fn an_image_that_memory_cannot_hold_is_named_with_its_numbers() {
        let site = Site::new(2);
        let failure = site.check_with(2, 1000).err().expect("refused");
        assert_eq!(failure.code, ErrorCode::Plan);
        let text = format!("{} {}", failure.title, failure.cause);
        assert!(text.contains("1.png") && text.contains("21 x 30"), "{text}");
        assert!(text.contains("1000 are available"), "{text}");
    }

    #[test]
    fn the_first_images_are_decoded_and_those_whose_end_proves_nothing() {
        let header = |is_whole: bool, side: u32| {
            let site = Site::new(1);
            let drawn = ImageFolder::new(site.dir.path()).header(Path::new("0.png"));
            let mut header = drawn.expect("a header");
            (header.width, header.height, header.is_whole) = (side, 1000, is_whole);
            Seen {
                path: "a".into(),
                file: None,
                header: Ok(header),
                decoded: false,
                known: false,
            }
        };
        let mut seen = vec![
            header(true, 50_000),
            header(true, 50_000),
            header(true, 1000),
            header(false, 1000),
            header(true, 1000),
        ];
        assert_eq!(to_decode(&seen, false), [0, 1, 3]);
        seen[0].decoded = true;
        seen[3].header = Err(ImageError::Missing { path: "a".into() });
        assert_eq!(to_decode(&seen, false), [1]);
        assert_eq!(to_decode(&seen, true), [1, 2, 4]);
    }

    #[test]
    fn long_checks_show_their_progress() {
        let mut lines = Vec::new();
        let mut check = ImageCheck {
            cache: None,
            decode_all: false,
            memory_bytes: 0,
            every: Duration::ZERO,
            show: &mut |line| lines.push(line),
        };
        let items = vec![0; 3 * AT_ONCE];
        let mut done = 0;
        in_parts(&items, both("checked", "已检查"), &mut check, |part| {
            done += part.len();
        });
        assert_eq!(done, items.len());
        assert_eq!(lines.len(), 2, "{lines:?}");
    }
}
