//! A machine for pickles that executes nothing.
//!
//! Values are in one list and refer to one another by position: reading and dropping need no recursion, whatever the
//! depth, and a value that occurs often is stored once. Functions and classes are looked up in [`Global`]; calling one
//! only makes another entry of the list.

use super::input::{Input, ReadAt};
use super::tensor::{Storage, TorchDtype, View};
use super::{Result, TorchError};
use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;

/// Most values of a pickle. A state dict has about 15 for each tensor.
const MAX_VALUES: usize = 4_000_000;
/// Longest integer in bytes that is understood; longer ones have no meaning in a state dict.
const MAX_INT_BYTES: usize = 16;

/// Most arguments of a call.
const MAX_ARGS: usize = 16;
/// Most axes of a tensor.
const MAX_AXES: usize = 64;

/// Position of a value in its [`Pickle`].
pub(super) type Id = u32;

/// What happens to names of functions and classes that are not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Globals {
    /// They are an error.
    Strict,
    /// They, and what is made with them, are [`Value::Opaque`].
    Opaque,
}

/// A function or class that a state dict needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Global {
    Tensor,
    Parameter,
    OrderedDict,
    /// `torch.Size` and `set`: lists here.
    Sequence,
    /// What has no content that is read: `torch.device`, and the bytes of protocol 2.
    Inert,
    Storage(TorchDtype),
}

impl Global {
    fn of(module: &str, name: &str) -> Option<Self> {
        Some(match (module, name) {
            ("torch._utils", "_rebuild_tensor_v2") => Self::Tensor,
            ("torch._utils", "_rebuild_parameter") => Self::Parameter,
            ("collections", "OrderedDict") => Self::OrderedDict,
            ("torch", "Size") | ("builtins" | "__builtin__", "set" | "frozenset") => Self::Sequence,
            ("_codecs", "encode") | ("torch", "device") => Self::Inert,
            ("torch" | "torch.storage", class) => Self::Storage(TorchDtype::of_class(class)?),
            _ => return None,
        })
    }
}

/// A value of a pickle.
#[derive(Debug)]
pub(super) enum Value {
    /// An object of an unknown class, or what an unknown function returns. It has no content here.
    Opaque,
    /// None, a float, bytes, or an integer that is too long.
    Scalar,
    /// An integer or a flag.
    Int(i128),
    Text(Rc<str>),
    /// A list, tuple or set.
    List(Vec<Id>),
    Dict(Vec<(Id, Id)>),
    Global(Global),
    Storage(Box<Storage>),
    Tensor(Box<View>),
}

/// The values of a pickle.
#[derive(Debug)]
pub(super) struct Pickle {
    values: Vec<Value>,
    root: Id,
}

impl Pickle {
    /// Reads the pickle at the beginning of `bytes`.
    pub(super) fn whole(bytes: &[u8], globals: Globals) -> Result<Self> {
        Self::read(&mut Input::new(bytes, 0, bytes.len() as u64), globals)
    }

    /// Reads one pickle; the input is then after its STOP.
    pub(super) fn read<R: ReadAt + ?Sized>(
        input: &mut Input<'_, R>,
        globals: Globals,
    ) -> Result<Self> {
        let mut machine = Machine {
            input,
            globals,
            values: Vec::new(),
            stack: Vec::new(),
            marks: Vec::new(),
            memo: HashMap::new(),
            copied: 0,
        };
        let root = machine.run()?;
        let values = machine.values;
        Ok(Self { values, root })
    }

    /// The object that was saved.
    pub(super) fn root(&self) -> Id {
        self.root
    }

    /// Number of values.
    pub(super) fn len(&self) -> usize {
        self.values.len()
    }

    pub(super) fn get(&self, id: Id) -> &Value {
        &self.values[id as usize]
    }

    /// Bytes per element of every storage, by its key.
    pub(super) fn storage_sizes(&self) -> Result<BTreeMap<&str, usize>> {
        let mut sizes = BTreeMap::new();
        for value in &self.values {
            if let Value::Storage(storage) = value {
                let size = storage.dtype.size_bytes();
                if sizes
                    .insert(&*storage.key, size)
                    .is_some_and(|other| other != size)
                {
                    return Err(storage.error("has two formats"));
                }
            }
        }
        Ok(sizes)
    }
}

struct Machine<'m, 's, R: ReadAt + ?Sized> {
    input: &'m mut Input<'s, R>,
    globals: Globals,
    values: Vec<Value>,
    stack: Vec<Id>,
    /// Heights of the stack.
    marks: Vec<usize>,
    memo: HashMap<u64, Id>,
    /// Entries of dicts that were made from lists.
    copied: usize,
}

impl<R: ReadAt + ?Sized> Machine<'_, '_, R> {
    fn run(&mut self) -> Result<Id> {
        loop {
            let opcode = self.input.number::<1>()? as u8;
            if opcode == b'.' {
                let root = self.pop()?;
                return match self.stack.is_empty() && self.marks.is_empty() {
                    true => Ok(root),
                    false => Err(self.input.error("values are left at its end")),
                };
            }
            self.step(opcode)?;
        }
    }

    fn step(&mut self, opcode: u8) -> Result<()> {
        match opcode {
            0x80 => match self.input.number::<1>()? {
                0..=5 => Ok(()),
                _ => Err(self.input.error("its protocol is not known")),
            },
            0x95 => self.input.skip(8),
            b'(' => {
                self.marks.push(self.stack.len());
                Ok(())
            }
            b'0' => match self.marks.last() == Some(&self.stack.len()) {
                true => self.mark().map(drop),
                false => self.pop().map(drop),
            },
            b'1' => self.above_mark().map(drop),
            b'2' => {
                let top = self.pop()?;
                self.stack.extend([top, top]);
                Ok(())
            }
            b'N' => self.push(Value::Scalar),
            0x88 => self.push(Value::Int(1)),
            0x89 => self.push(Value::Int(0)),
            b'I' | b'L' | b'J' | b'K' | b'M' | 0x8a | 0x8b => self.integer(opcode),
            b'F' => self.input.line().and_then(|_| self.push(Value::Scalar)),
            b'G' => self.blob(8),
            b'S' | b'V' | b'T' | b'U' | b'X' | 0x8c | 0x8d => self.text(opcode),
            b'B' | b'C' | 0x8e | 0x96 => self.bytes(opcode),
            b']' | b')' | 0x8f => self.push(Value::List(Vec::new())),
            b'}' => self.push(Value::Dict(Vec::new())),
            b'l' | b't' | 0x91 => {
                let items = self.above_mark()?;
                self.push(Value::List(items))
            }
            0x85..=0x87 => {
                let count = usize::from(opcode - 0x84);
                let start = self
                    .stack
                    .len()
                    .checked_sub(count)
                    .filter(|start| *start >= self.floor());
                let start = start.ok_or_else(|| self.underflow())?;
                let items = self.stack.split_off(start);
                self.push(Value::List(items))
            }
            b'd' => {
                let items = self.above_mark()?;
                let entries = self.pairs(&items)?;
                self.push(Value::Dict(entries))
            }
            b'a' => {
                let item = self.pop()?;
                self.append(vec![item])
            }
            b'e' | 0x90 => {
                let items = self.above_mark()?;
                self.append(items)
            }
            b's' => {
                let (value, key) = (self.pop()?, self.pop()?);
                self.set(vec![(key, value)])
            }
            b'u' => {
                let items = self.above_mark()?;
                let entries = self.pairs(&items)?;
                self.set(entries)
            }
            b'g' | b'h' | b'j' => self.get(opcode),
            b'p' | b'q' | b'r' | 0x94 => self.put(opcode),
            b'c' => {
                let (module, name) = (self.input.line()?, self.input.line()?);
                self.global(&module, &name)
            }
            0x93 => self.stack_global(),
            b'R' => self.call(),
            0x81 => self.call(),
            b'b' => self.build(),
            b'i' => {
                let (module, name) = (self.input.line()?, self.input.line()?);
                self.above_mark()?;
                self.unknown(&format!("{module}.{name}"))
            }
            b'o' => {
                self.above_mark()?;
                self.unknown("an object by the opcode OBJ")
            }
            0x92 => {
                for _ in 0..3 {
                    self.pop()?;
                }
                self.unknown("an object by the opcode NEWOBJ_EX")
            }
            0x82 => self.extension::<1>(),
            0x83 => self.extension::<2>(),
            0x84 => self.extension::<4>(),
            b'Q' => self.persistent(),
            _ => Err(self.input.error("an opcode is not known")),
        }
    }

    fn underflow(&self) -> TorchError {
        self.input.error("its stack is empty")
    }

    /// Height of the stack that must remain.
    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    fn pop(&mut self) -> Result<Id> {
        match self.stack.len() > self.floor() {
            true => self.stack.pop().ok_or_else(|| self.underflow()),
            false => Err(self.underflow()),
        }
    }

    fn mark(&mut self) -> Result<usize> {
        self.marks.pop().ok_or_else(|| self.underflow())
    }

    fn above_mark(&mut self) -> Result<Vec<Id>> {
        let mark = self.mark()?;
        Ok(self.stack.split_off(mark))
    }

    fn push(&mut self, value: Value) -> Result<()> {
        if self.values.len() >= MAX_VALUES {
            return Err(self.input.error("it has too many values"));
        }
        self.stack.push(self.values.len() as Id);
        self.values.push(value);
        Ok(())
    }

    fn value(&self, id: Id) -> &Value {
        &self.values[id as usize]
    }

    /// Entries from keys and values in turn.
    fn pairs(&self, items: &[Id]) -> Result<Vec<(Id, Id)>> {
        let pairs = items.chunks_exact(2);
        match pairs.remainder().is_empty() {
            true => Ok(pairs.map(|pair| (pair[0], pair[1])).collect()),
            false => Err(self.input.error("a key has no value")),
        }
    }

    fn top(&mut self) -> Result<&mut Value> {
        let top = self.pop()?;
        self.stack.push(top);
        Ok(&mut self.values[top as usize])
    }

    fn append(&mut self, items: Vec<Id>) -> Result<()> {
        match self.top()? {
            Value::List(list) => list.extend(items),
            Value::Opaque => {}
            _ => return Err(self.input.error("it appends to what is no list")),
        }
        Ok(())
    }

    fn set(&mut self, new: Vec<(Id, Id)>) -> Result<()> {
        match self.top()? {
            Value::Dict(entries) => entries.extend(new),
            Value::Opaque => {}
            _ => return Err(self.input.error("it sets entries of what is no dict")),
        }
        Ok(())
    }

    fn integer(&mut self, opcode: u8) -> Result<()> {
        let bytes = match opcode {
            b'J' => return self.number::<4>(true),
            b'K' => return self.number::<1>(false),
            b'M' => return self.number::<2>(false),
            b'I' | b'L' => {
                let line = self.input.line()?;
                let digits = line.strip_suffix('L').unwrap_or(&line);
                let value = digits.parse().map_or(Value::Scalar, Value::Int);
                return self.push(value);
            }
            0x8a => self.input.number::<1>()?,
            _ => match u64::try_from(self.input.number::<4>()? as u32 as i32) {
                Ok(bytes) => bytes,
                Err(_) => return Err(self.input.error("a length is negative")),
            },
        };
        if bytes > MAX_INT_BYTES as u64 {
            return self.blob(bytes);
        }
        let digits = self.input.take(bytes)?;
        let negative = digits.last().is_some_and(|byte| byte & 0x80 != 0);
        let mut wide = [if negative { 0xff } else { 0 }; MAX_INT_BYTES];
        wide[..digits.len()].copy_from_slice(digits);
        self.push(Value::Int(i128::from_le_bytes(wide)))
    }

    fn number<const N: usize>(&mut self, signed: bool) -> Result<()> {
        let number = self.input.number::<N>()?;
        let value = match signed {
            true => i128::from(number as u32 as i32),
            false => i128::from(number),
        };
        self.push(Value::Int(value))
    }

    fn text(&mut self, opcode: u8) -> Result<()> {
        let bytes = match opcode {
            b'S' | b'V' => {
                let line = self.input.line()?;
                let quoted = [b'\'', b'"'].map(char::from);
                return self.push(Value::Text(line.trim_matches(quoted).into()));
            }
            b'U' | 0x8c => self.input.number::<1>()?,
            b'T' | b'X' => self.input.number::<4>()?,
            _ => self.input.number::<8>()?,
        };
        let text = std::str::from_utf8(self.input.take(bytes)?).map(Rc::from);
        // Python 2 writes bytes as text.
        self.push(text.map_or(Value::Scalar, Value::Text))
    }

    fn bytes(&mut self, opcode: u8) -> Result<()> {
        let bytes = match opcode {
            b'C' => self.input.number::<1>()?,
            b'B' => self.input.number::<4>()?,
            _ => self.input.number::<8>()?,
        };
        self.blob(bytes)
    }

    /// Passes over a value of so many bytes.
    fn blob(&mut self, bytes: u64) -> Result<()> {
        self.input.skip(bytes)?;
        self.push(Value::Scalar)
    }

    fn get(&mut self, opcode: u8) -> Result<()> {
        let index = self.memo_index(opcode == b'g', opcode == b'h')?;
        match self.memo.get(&index) {
            Some(id) => self.stack.push(*id),
            None => {
                return Err(self
                    .input
                    .error("it reads an entry of its memo that is not set"));
            }
        }
        Ok(())
    }

    fn put(&mut self, opcode: u8) -> Result<()> {
        let index = match opcode {
            0x94 => self.memo.len() as u64,
            _ => self.memo_index(opcode == b'p', opcode == b'q')?,
        };
        let top = self.pop()?;
        self.stack.push(top);
        self.memo.insert(index, top);
        Ok(())
    }

    fn memo_index(&mut self, line: bool, short: bool) -> Result<u64> {
        match (line, short) {
            (true, _) => {
                let line = self.input.line()?;
                line.parse()
                    .map_err(|_| self.input.error("an index is no number"))
            }
            (_, true) => self.input.number::<1>(),
            _ => self.input.number::<4>(),
        }
    }

    fn unknown(&mut self, name: &str) -> Result<()> {
        match self.globals {
            Globals::Strict => Err(TorchError::Code {
                name: name.to_owned(),
            }),
            Globals::Opaque => self.push(Value::Opaque),
        }
    }

    fn extension<const N: usize>(&mut self) -> Result<()> {
        self.input.number::<N>()?;
        self.unknown("an object of Python's extension registry")
    }

    fn global(&mut self, module: &str, name: &str) -> Result<()> {
        match Global::of(module, name) {
            Some(global) => self.push(Value::Global(global)),
            None => self.unknown(&format!("{module}.{name}")),
        }
    }

    fn stack_global(&mut self) -> Result<()> {
        let (name, module) = (self.pop()?, self.pop()?);
        match (self.value(module), self.value(name)) {
            (Value::Text(module), Value::Text(name)) => {
                let (module, name) = (module.clone(), name.clone());
                self.global(&module, &name)
            }
            _ => Err(self.input.error("the name of a class is no text")),
        }
    }

    /// A call: of a function, or of a class for a new object.
    fn call(&mut self) -> Result<()> {
        let (args, function) = (self.pop()?, self.pop()?);
        let args = match self.value(args) {
            Value::List(args) if args.len() <= MAX_ARGS => args.clone(),
            Value::List(_) => return Err(self.input.error("a call has too many arguments")),
            Value::Opaque => Vec::new(),
            _ => return Err(self.input.error("the arguments of a call are no tuple")),
        };
        let global = match self.value(function) {
            Value::Global(global) => *global,
            Value::Opaque => return self.push(Value::Opaque),
            _ => return Err(self.input.error("it calls what is no function")),
        };
        let value = match global {
            Global::Tensor => Some(Value::Tensor(self.view(&args)?.into())),
            Global::Parameter => return self.parameter(&args),
            Global::OrderedDict => self.ordered(&args),
            Global::Sequence => match args.first().map(|first| (*first, self.value(*first))) {
                None => Some(Value::List(Vec::new())),
                Some((list, Value::List(_))) => {
                    self.stack.push(list);
                    return Ok(());
                }
                Some(_) => None,
            },
            Global::Inert => Some(Value::Scalar),
            Global::Storage(_) => None,
        };
        match value {
            Some(value) => self.push(value),
            None => self.unknown("a known class with unknown arguments"),
        }
    }

    fn parameter(&mut self, args: &[Id]) -> Result<()> {
        let data = args.first().copied();
        match data.map(|data| (data, self.value(data))) {
            Some((data, Value::Tensor(_))) => self.stack.push(data),
            _ => return Err(self.input.error("a parameter has no tensor")),
        }
        Ok(())
    }

    /// `OrderedDict()`, or of a list of pairs, as Python 2 writes it.
    fn ordered(&mut self, args: &[Id]) -> Option<Value> {
        let Some(first) = args.first() else {
            return Some(Value::Dict(Vec::new()));
        };
        let Value::List(pairs) = self.value(*first) else {
            return None;
        };
        // One list may be the argument of many calls.
        if pairs.len() > MAX_VALUES - self.copied.min(MAX_VALUES) {
            return None;
        }
        let copied = self.copied + pairs.len();
        let entries = pairs.iter().map(|pair| match self.value(*pair) {
            Value::List(pair) => Some((*pair.first()?, *pair.get(1)?)),
            _ => None,
        });
        let entries = entries.collect::<Option<_>>()?;
        self.copied = copied;
        Some(Value::Dict(entries))
    }

    /// State of an object, which has no effect on names and tensors: `_metadata` of a state dict.
    fn build(&mut self) -> Result<()> {
        self.pop()?;
        match self.top()? {
            Value::Dict(_) | Value::Opaque | Value::Tensor(_) => Ok(()),
            _ => Err(self.input.error("it gives a state to what has none")),
        }
    }

    fn view(&self, args: &[Id]) -> Result<View> {
        let wrong = || self.input.error("the arguments of a tensor are damaged");
        let &[storage, offset, size, stride, ..] = args else {
            return Err(wrong());
        };
        let numbers = |id: Id| match self.value(id) {
            Value::List(items) if items.len() <= MAX_AXES => items
                .iter()
                .map(|item| match self.value(*item) {
                    Value::Int(number) => Some(*number),
                    _ => None,
                })
                .collect::<Option<Vec<i128>>>(),
            _ => None,
        };
        let (Value::Storage(storage), Value::Int(offset)) =
            (self.value(storage), self.value(offset))
        else {
            return Err(wrong());
        };
        let (size, stride) = (
            numbers(size).ok_or_else(wrong)?,
            numbers(stride).ok_or_else(wrong)?,
        );
        View::new((**storage).clone(), *offset, &size, &stride)
    }

    /// A storage: `('storage', class, key, location, elements)`, in old files with the range of a view.
    fn persistent(&mut self) -> Result<()> {
        let id = self.pop()?;
        let storage = self.storage(id)?;
        self.push(Value::Storage(storage.into()))
    }

    fn storage(&self, id: Id) -> Result<Storage> {
        let wrong = || self.input.error("the description of a storage is damaged");
        let number = |id: &Id| match self.value(*id) {
            Value::Int(number) => u64::try_from(*number).ok(),
            _ => None,
        };
        let Value::List(fields) = self.value(id) else {
            return Err(wrong());
        };
        let (Some(&[kind, class, key, _, elems]), rest) =
            (fields.first_chunk::<5>(), &fields[fields.len().min(5)..])
        else {
            return Err(wrong());
        };
        let dtype = match (self.value(kind), self.value(class)) {
            (Value::Text(kind), Value::Global(Global::Storage(dtype))) if &**kind == "storage" => {
                *dtype
            }
            (_, Value::Opaque) => {
                return Err(self
                    .input
                    .error("a storage is of a class that is not known"));
            }
            _ => return Err(wrong()),
        };
        let Value::Text(key) = self.value(key) else {
            return Err(wrong());
        };
        let whole_elems = number(&elems).ok_or_else(wrong)?;
        let (first, elems) = match rest.first().map(|view| self.value(*view)) {
            None | Some(Value::Scalar) => (0, whole_elems),
            Some(Value::List(view)) => match &view[..] {
                [_, first, elems] => (
                    number(first).ok_or_else(wrong)?,
                    number(elems).ok_or_else(wrong)?,
                ),
                _ => return Err(wrong()),
            },
            Some(_) => return Err(wrong()),
        };
        let key = key.clone();
        let storage = Storage {
            dtype,
            key,
            whole_elems,
            first,
            elems,
        };
        storage.checked()
    }
}
