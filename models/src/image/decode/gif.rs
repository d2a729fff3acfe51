//! The first frame of a GIF, as Pillow shows it: a transparent pixel keeps its color, and what the frame leaves free has
//! the transparent color, otherwise the first of the palette.

use gif::{ColorOutput, DecodeOptions, MemoryLimit};

/// Width and height of the canvas, from the first bytes of the file.
pub(super) fn canvas(start: &[u8]) -> Option<(u32, u32)> {
    let [.., w0, w1, h0, h1] = start.first_chunk::<10>()?;
    let side = |low: u8, high: u8| u32::from(u16::from_le_bytes([low, high]));
    Some((side(*w0, *w1), side(*h0, *h1)))
}

/// RGB bytes of the first frame on a canvas of `width` x `height` pixels.
///
/// # Errors
/// What is wrong with the file.
pub(super) fn first_frame(bytes: &[u8], width: usize, height: usize) -> Result<Vec<u8>, String> {
    let mut options = DecodeOptions::new();
    options.set_color_output(ColorOutput::Indexed);
    // The size of the frame is compared before its pixels are read.
    options.set_memory_limit(MemoryLimit::Unlimited);
    let mut decoder = options
        .read_info(bytes)
        .map_err(|error| error.to_string())?;
    let frame = decoder
        .next_frame_info()
        .map_err(|error| error.to_string())?;
    let frame = frame.ok_or("it has no frame")?;
    let [left, top, columns, rows] =
        [frame.left, frame.top, frame.width, frame.height].map(usize::from);
    if left + columns > width || top + rows > height {
        return Err("its first frame is larger than the picture".to_owned());
    }
    let free = frame.transparent.unwrap_or(0);
    let own = frame.palette.clone();
    let palette = own.or_else(|| decoder.global_palette().map(<[u8]>::to_vec));
    let palette = palette.ok_or("it has no palette")?;
    let mut indices = vec![0; columns * rows];
    let read = decoder.read_into_buffer(&mut indices);
    read.map_err(|error| error.to_string())?;
    let color = |index: u8| {
        let at = usize::from(index) * 3;
        // An index beyond the palette is black.
        palette
            .get(at..at + 3)
            .map_or([0; 3], |rgb| [rgb[0], rgb[1], rgb[2]])
    };
    let mut pixels = color(free).repeat(width * height);
    if columns > 0 {
        for (row, line) in indices.chunks_exact(columns).enumerate() {
            let start = ((top + row) * width + left) * 3;
            let target = pixels[start..][..columns * 3].as_chunks_mut::<3>().0;
            for (pixel, index) in target.iter_mut().zip(line) {
                *pixel = color(*index);
            }
        }
    }
    Ok(pixels)
}
