//! Lists of names and values as ZFS's library takes and gives them, copied to and from plain data.
#![allow(unsafe_code, reason = "nvlists live in the library")]

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int};
use std::ptr;

use super::bindings::{
    DATA_TYPE_BOOLEAN, DATA_TYPE_BOOLEAN_VALUE, DATA_TYPE_INT32, DATA_TYPE_INT64, DATA_TYPE_NVLIST, DATA_TYPE_STRING,
    DATA_TYPE_UINT64, LibZfsCore, nvlist_t,
};

/// Names and values.
pub(crate) type Map = BTreeMap<String, Value>;

/// One value, as far as this crate has to do with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Value {
    /// The name alone says it.
    Flag,
    Bool(bool),
    I32(i32),
    I64(i64),
    U64(u64),
    Text(String),
    Map(Map),
    /// Something of another type, which nothing here asks for.
    Other,
}

impl Value {
    pub(crate) fn text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }

    pub(crate) fn map(&self) -> Option<&Map> {
        match self {
            Self::Map(map) => Some(map),
            _ => None,
        }
    }

    /// A whole number, whatever its width. Lua knows only signed ones: large unsigned ones come back whole.
    pub(crate) fn number(&self) -> Option<u64> {
        match self {
            Self::I32(number) => Some(i64::from(*number).cast_unsigned()),
            Self::I64(number) => Some(number.cast_unsigned()),
            Self::U64(number) => Some(*number),
            _ => None,
        }
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<String> for Value {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<Map> for Value {
    fn from(map: Map) -> Self {
        Self::Map(map)
    }
}

/// A list that the library made, freed when this is dropped.
pub(super) struct NvList<'a> {
    library: &'a LibZfsCore,
    list: *mut nvlist_t,
}

impl<'a> NvList<'a> {
    /// Copies a map into a list of the library's. Fails, with an errno, for want of memory and where a text holds a
    /// NUL.
    pub(super) fn of(library: &'a LibZfsCore, map: &Map) -> Result<Self, c_int> {
        /// Every name once, which makes the list a map.
        const UNIQUE_NAMES: u32 = 1;
        let mut list = ptr::null_mut();
        // SAFETY: the library puts a new list into `list`, which nobody else knows.
        check(unsafe { library.nvlist_alloc(&raw mut list, UNIQUE_NAMES, 0) })?;
        let this = Self { library, list };
        for (name, value) in map {
            let name = text(name)?;
            this.add(&name, value)?;
        }
        Ok(this)
    }

    fn add(&self, name: &CStr, value: &Value) -> Result<(), c_int> {
        let (library, list, name) = (self.library, self.list, name.as_ptr());
        match value {
            // SAFETY: in each call `list` is alive, and `name` and the value are too; the library copies both.
            Value::Flag => check(unsafe { library.nvlist_add_boolean(list, name) }),
            // SAFETY: as above.
            Value::Bool(value) => check(unsafe { library.nvlist_add_boolean_value(list, name, (*value).into()) }),
            // SAFETY: as above.
            Value::I32(value) => check(unsafe { library.nvlist_add_int32(list, name, *value) }),
            // SAFETY: as above.
            Value::I64(value) => check(unsafe { library.nvlist_add_int64(list, name, *value) }),
            // SAFETY: as above.
            Value::U64(value) => check(unsafe { library.nvlist_add_uint64(list, name, *value) }),
            Value::Text(value) => {
                let value = text(value)?;
                // SAFETY: as above.
                check(unsafe { library.nvlist_add_string(list, name, value.as_ptr()) })
            }
            Value::Map(value) => {
                let value = Self::of(library, value)?;
                // SAFETY: as above.
                check(unsafe { library.nvlist_add_nvlist(list, name, value.list) })
            }
            Value::Other => Err(INVALID),
        }
    }

    pub(super) fn as_ptr(&self) -> *mut nvlist_t {
        self.list
    }
}

impl Drop for NvList<'_> {
    fn drop(&mut self) {
        // SAFETY: the list is ours and is not used any more.
        unsafe { self.library.nvlist_free(self.list) };
    }
}

/// A place for the library to put a list that it makes.
pub(super) struct Returned<'a> {
    library: &'a LibZfsCore,
    list: *mut nvlist_t,
}

impl<'a> Returned<'a> {
    pub(super) fn new(library: &'a LibZfsCore) -> Self {
        Self { library, list: ptr::null_mut() }
    }

    pub(super) fn as_mut_ptr(&mut self) -> *mut *mut nvlist_t {
        &raw mut self.list
    }

    /// Copies what the library made; empty where it made nothing.
    pub(super) fn into_map(self) -> Map {
        let list = NvList { library: self.library, list: self.list };
        if list.list.is_null() {
            // Freeing nothing is allowed.
            return Map::new();
        }
        // SAFETY: the library made the list, and it is ours to free.
        unsafe { copy(list.library, list.list) }
    }
}

/// Copies a list of the library's.
///
/// # Safety
/// The list must be alive and must not be changed meanwhile.
unsafe fn copy(library: &LibZfsCore, list: *mut nvlist_t) -> Map {
    let mut map = Map::new();
    let mut pair = ptr::null_mut();
    loop {
        // SAFETY: the list is alive, and `pair` is null or one of its pairs.
        pair = unsafe { library.nvlist_next_nvpair(list, pair) };
        if pair.is_null() {
            return map;
        }
        // SAFETY: a pair of a living list, whose name is a text that lives as long.
        let name = unsafe { owned(library.nvpair_name(pair)) };
        // SAFETY: as above.
        let kind = unsafe { library.nvpair_type(pair) };
        let value = match kind {
            DATA_TYPE_BOOLEAN => Some(Value::Flag),
            DATA_TYPE_BOOLEAN_VALUE => {
                let mut value = 0;
                // SAFETY: as above, for a pair of this type; the library fills `value`.
                let done = unsafe { library.nvpair_value_boolean_value(pair, &raw mut value) };
                (done == 0).then_some(Value::Bool(value != 0))
            }
            DATA_TYPE_INT32 => {
                let mut value = 0;
                // SAFETY: as above.
                let done = unsafe { library.nvpair_value_int32(pair, &raw mut value) };
                (done == 0).then_some(Value::I32(value))
            }
            DATA_TYPE_INT64 => {
                let mut value = 0;
                // SAFETY: as above.
                let done = unsafe { library.nvpair_value_int64(pair, &raw mut value) };
                (done == 0).then_some(Value::I64(value))
            }
            DATA_TYPE_UINT64 => {
                let mut value = 0;
                // SAFETY: as above.
                let done = unsafe { library.nvpair_value_uint64(pair, &raw mut value) };
                (done == 0).then_some(Value::U64(value))
            }
            DATA_TYPE_STRING => {
                let mut value = ptr::null();
                // SAFETY: as above; the text that `value` then points to lives as long as the list.
                let done = unsafe { library.nvpair_value_string(pair, &raw mut value) };
                // SAFETY: as above.
                (done == 0).then(|| Value::Text(unsafe { owned(value) }))
            }
            DATA_TYPE_NVLIST => {
                let mut value = ptr::null_mut();
                // SAFETY: as above; the list that `value` then points to is a part of this one.
                let done = unsafe { library.nvpair_value_nvlist(pair, &raw mut value) };
                // SAFETY: as above.
                (done == 0).then(|| Value::Map(unsafe { copy(library, value) }))
            }
            _ => None,
        };
        map.insert(name, value.unwrap_or(Value::Other));
    }
}

/// Copies a text of the library's.
///
/// # Safety
/// `text` must be null or point to a text that ends in NUL.
unsafe fn owned(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// `EINVAL`.
pub(super) const INVALID: c_int = 22;

/// A text for the library; a NUL in it is refused as an invalid argument.
pub(super) fn text(text: &str) -> Result<CString, c_int> {
    CString::new(text).map_err(|_| INVALID)
}

fn check(errno: c_int) -> Result<(), c_int> {
    if errno == 0 { Ok(()) } else { Err(errno) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::load;

    #[test]
    fn lists_survive_the_library() {
        let Ok(library) = load() else {
            println!("skipped: ZFS");
            return;
        };
        let inner = Map::from([("deep".to_owned(), Value::U64(u64::MAX)), ("none".to_owned(), Value::Map(Map::new()))]);
        let map = Map::from([
            ("flag".to_owned(), Value::Flag),
            ("yes".to_owned(), Value::Bool(true)),
            ("small".to_owned(), Value::I32(-7)),
            ("large".to_owned(), Value::I64(i64::MIN)),
            ("text".to_owned(), Value::from("a text, ä")),
            ("inner".to_owned(), Value::Map(inner)),
        ]);
        let list = NvList::of(library, &map).unwrap();
        // SAFETY: the list is alive and nobody else knows it.
        assert_eq!(unsafe { copy(library, list.as_ptr()) }, map);
        let bad = Map::from([("nul".to_owned(), Value::from("a\0b"))]);
        assert_eq!(NvList::of(library, &bad).err(), Some(INVALID));
    }

    #[test]
    fn numbers_that_lua_shows_as_negative_are_whole() {
        assert_eq!(Value::I64(-1).number(), Some(u64::MAX));
        assert_eq!(Value::from("1").number(), None);
    }
}
