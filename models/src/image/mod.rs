//! Picture decoding and the resize that equals Pillow byte for byte.
