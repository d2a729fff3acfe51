//! A model split over several safetensors files with the index that Hugging Face's loaders read.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::CheckpointError;
use super::fs::{Disk, FileSystem};
use super::tensor_file::{FileDigest, TensorFileWriter, TensorSpec, write_file};

/// One file to be written.
#[derive(Debug)]
struct Shard {
    file: String,
    tensors: Vec<TensorSpec>,
}

/// Writer of a model as `<stem>.safetensors`, or as several files with an index if it exceeds a shard size.
/// The files are then `<stem>-00001-of-0000N.safetensors`, … and `<stem>.safetensors.index.json`. Tensors are
/// written in the declared order, each in any number of parts.
#[derive(Debug)]
pub struct ShardedTensorWriter {
    fs: Arc<dyn FileSystem>,
    directory: PathBuf,
    stem: String,
    metadata: Vec<(String, String)>,
    shards: Vec<Shard>,
    current: Option<TensorFileWriter>,
    finished: Vec<(String, FileDigest)>,
}

impl ShardedTensorWriter {
    /// Divides the tensors among files, in order, and opens the first file. The next file starts where a
    /// tensor would exceed `max_shard_bytes`. A single larger tensor still gets a file of its own.
    ///
    /// # Errors
    /// As [`TensorFileWriter::create`].
    pub fn create(
        directory: &Path,
        stem: &str,
        tensors: &[TensorSpec],
        metadata: &[(&str, &str)],
        max_shard_bytes: u64,
    ) -> Result<Self, CheckpointError> {
        let mut writer = Self {
            fs: Arc::new(Disk),
            directory: directory.to_owned(),
            stem: stem.to_owned(),
            metadata: metadata
                .iter()
                .map(|&(k, v)| (k.to_owned(), v.to_owned()))
                .collect(),
            shards: split(stem, tensors, max_shard_bytes)?,
            current: None,
            finished: Vec::new(),
        };
        writer.current = Some(writer.open(0)?);
        Ok(writer)
    }

    /// Appends the next bytes of the tensor `name`: little-endian elements in row-major order.
    ///
    /// # Errors
    /// As [`TensorFileWriter::write`].
    pub fn write(&mut self, name: &str, bytes: &[u8]) -> Result<(), CheckpointError> {
        let due_here = |shard: &Shard| shard.tensors.iter().any(|tensor| tensor.name == name);
        while self.finished.len() + 1 < self.shards.len()
            && self
                .current
                .as_ref()
                .is_some_and(TensorFileWriter::is_complete)
            && !due_here(&self.shards[self.finished.len()])
        {
            self.next_shard()?;
        }
        self.current
            .as_mut()
            .expect("a shard is open until `finish`")
            .write(name, bytes)
    }

    /// Syncs all files to disk, and writes the index if there are several. Returns their names relative to
    /// the directory, with lengths and hashes.
    ///
    /// # Errors
    /// [`CheckpointError::WriteOrder`] when data is missing; disk errors.
    pub fn finish(mut self) -> Result<Vec<(String, FileDigest)>, CheckpointError> {
        while self.finished.len() < self.shards.len() {
            self.next_shard()?;
        }
        if self.shards.len() > 1 {
            let name = format!("{}.safetensors.index.json", self.stem);
            let mut text = index(&self.shards)?.to_string();
            text.push('\n');
            let digest = write_file(
                self.fs.as_ref(),
                &self.directory.join(&name),
                text.as_bytes(),
            )?;
            self.finished.push((name, digest));
        }
        Ok(self.finished)
    }

    /// Finishes the open shard and opens the next one, if any.
    fn next_shard(&mut self) -> Result<(), CheckpointError> {
        let done = self.finished.len();
        let current = self
            .current
            .take()
            .expect("a shard is open until the last is finished");
        self.finished
            .push((self.shards[done].file.clone(), current.finish()?));
        if done + 1 < self.shards.len() {
            self.current = Some(self.open(done + 1)?);
        }
        Ok(())
    }

    fn open(&self, shard: usize) -> Result<TensorFileWriter, CheckpointError> {
        let Shard { file, tensors } = &self.shards[shard];
        let metadata: Vec<(&str, &str)> = self
            .metadata
            .iter()
            .map(|(k, v)| (k.as_str(), v.as_str()))
            .collect();
        TensorFileWriter::create_on(&self.fs, &self.directory.join(file), tensors, &metadata)
    }
}

/// Groups the tensors in order and names the files.
fn split(
    stem: &str,
    tensors: &[TensorSpec],
    max_shard_bytes: u64,
) -> Result<Vec<Shard>, CheckpointError> {
    let mut groups: Vec<Vec<TensorSpec>> = vec![Vec::new()];
    let mut group_bytes = 0u64;
    for tensor in tensors {
        let bytes = tensor.bytes()?;
        let group = groups.last_mut().expect("there is always a group");
        if !group.is_empty() && group_bytes.saturating_add(bytes) > max_shard_bytes {
            groups.push(vec![tensor.clone()]);
            group_bytes = bytes;
        } else {
            group.push(tensor.clone());
            group_bytes = group_bytes.saturating_add(bytes);
        }
    }
    let count = groups.len();
    let file = |i: usize| match count {
        1 => format!("{stem}.safetensors"),
        _ => format!("{stem}-{:05}-of-{count:05}.safetensors", i + 1),
    };
    Ok(groups
        .into_iter()
        .enumerate()
        .map(|(i, tensors)| Shard {
            file: file(i),
            tensors,
        })
        .collect())
}

fn index(shards: &[Shard]) -> Result<Value, CheckpointError> {
    let mut weight_map = Map::new();
    let mut total_size = 0u64;
    for shard in shards {
        for tensor in &shard.tensors {
            total_size = total_size.saturating_add(tensor.bytes()?);
            weight_map.insert(tensor.name.clone(), shard.file.clone().into());
        }
    }
    Ok(json!({ "metadata": { "total_size": total_size }, "weight_map": weight_map }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernels::DType;
    use safetensors::SafeTensors;

    fn specs() -> Vec<TensorSpec> {
        [("a", 6), ("b", 6), ("none", 0), ("c", 30), ("d", 2)]
            .map(|(name, len)| TensorSpec {
                name: name.into(),
                dtype: DType::U8,
                shape: vec![len],
            })
            .to_vec()
    }

    fn write(directory: &Path, max_shard_bytes: u64) -> Vec<(String, FileDigest)> {
        let specs = specs();
        let metadata = [("format", "pt")];
        let mut writer =
            ShardedTensorWriter::create(directory, "model", &specs, &metadata, max_shard_bytes)
                .unwrap();
        for (i, spec) in specs.iter().enumerate() {
            let bytes = vec![i as u8; spec.shape[0]];
            for part in bytes.chunks(4) {
                writer.write(&spec.name, part).unwrap();
            }
        }
        writer.finish().unwrap()
    }

    #[test]
    fn a_small_model_is_one_file_without_index() {
        let directory = tempfile::tempdir().unwrap();
        let files = write(directory.path(), 1000);
        assert_eq!(files.len(), 1);
        assert_eq!(files[0].0, "model.safetensors");
    }

    #[test]
    fn shards_read_back_through_the_index() {
        let directory = tempfile::tempdir().unwrap();
        let files = write(directory.path(), 12);
        let names: Vec<&str> = files.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(
            names,
            [
                "model-00001-of-00003.safetensors",
                "model-00002-of-00003.safetensors",
                "model-00003-of-00003.safetensors",
                "model.safetensors.index.json"
            ]
        );
        let read = |name: &str| std::fs::read(directory.path().join(name)).unwrap();
        for (name, digest) in &files {
            assert_eq!(digest.blake3, blake3::hash(&read(name)).to_hex().as_str());
        }
        let index: Value = serde_json::from_slice(&read(names[3])).unwrap();
        assert_eq!(index["metadata"]["total_size"], 44);
        for (i, spec) in specs().iter().enumerate() {
            let bytes = read(index["weight_map"][&spec.name].as_str().unwrap());
            let file = SafeTensors::deserialize(&bytes).unwrap();
            assert_eq!(
                file.tensor(&spec.name).unwrap().data(),
                vec![i as u8; spec.shape[0]]
            );
        }
    }

    #[test]
    fn finishing_with_missing_data_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let mut writer =
            ShardedTensorWriter::create(directory.path(), "model", &specs(), &[], 12).unwrap();
        writer.write("a", &[0; 6]).unwrap();
        assert!(matches!(
            writer.finish(),
            Err(CheckpointError::WriteOrder { .. })
        ));
    }
}
