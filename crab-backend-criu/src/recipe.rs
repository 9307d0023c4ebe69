//! How the images of a dump are put together from packs: for each file its name, its size, and runs of pages.

use crab_core::{Error, ErrorKind, Result};
use prost::Message;

use crate::pack::PAGE;

/// A recipe is a few bytes for each run; a larger one is none.
pub(crate) const LIMIT: u64 = 1 << 30;

/// Pages that lie one after another in an image and in a pack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    /// The pack, by its place in the manifest; `None` for pages of zeros.
    pub(crate) pack: Option<usize>,
    /// The first page in the pack.
    pub(crate) first: u32,
    pub(crate) count: u32,
}

/// One image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Image {
    pub(crate) name: String,
    pub(crate) size: u64,
    pub(crate) runs: Vec<Run>,
}

impl Image {
    /// An image of no pages yet.
    pub(crate) fn new(name: String, size: u64) -> Self {
        Self { name, size, runs: Vec::new() }
    }

    /// Adds one page.
    pub(crate) fn push(&mut self, pack: Option<usize>, page: u32) {
        if let Some(last) = self.runs.last_mut()
            && last.pack == pack
            && (pack.is_none() || last.first.checked_add(last.count) == Some(page))
            && last.count < u32::MAX
        {
            last.count += 1;
        } else {
            self.runs.push(Run { pack, first: if pack.is_none() { 0 } else { page }, count: 1 });
        }
    }

    fn pages(&self) -> u64 {
        self.runs.iter().map(|run| u64::from(run.count)).sum()
    }
}

#[derive(Clone, PartialEq, Message)]
struct WireImage {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(uint64, tag = "2")]
    size: u64,
    /// Three numbers for each run: pack plus one or zero, first page, count.
    #[prost(uint32, repeated, tag = "3")]
    runs: Vec<u32>,
}

#[derive(Clone, PartialEq, Message)]
struct WireRecipe {
    #[prost(message, repeated, tag = "1")]
    images: Vec<WireImage>,
}

/// As bytes.
pub(crate) fn encode(images: &[Image]) -> Result<Vec<u8>> {
    let too_many = |_| Error::new(ErrorKind::Internal, "an artifact has too many packs");
    let mut wire = WireRecipe::default();
    for image in images {
        let mut runs = Vec::with_capacity(3 * image.runs.len());
        for run in &image.runs {
            let pack = run.pack.map_or(Ok(0), |pack| u32::try_from(pack + 1)).map_err(too_many)?;
            runs.extend([pack, run.first, run.count]);
        }
        wire.images.push(WireImage { name: image.name.clone(), size: image.size, runs });
    }
    Ok(wire.encode_to_vec())
}

/// From bytes. `pages` says how many pages each pack has.
pub(crate) fn decode(bytes: &[u8], pages: &[usize]) -> Result<Vec<Image>, String> {
    let bad = |what: &str| format!("the list of its images {what}");
    let wire = WireRecipe::decode(bytes).map_err(|e| bad(&format!("cannot be read: {e}")))?;
    let mut images = Vec::with_capacity(wire.images.len());
    let mut names = std::collections::HashSet::new();
    for image in wire.images {
        if !is_image_name(&image.name) || !names.insert(image.name.clone()) {
            return Err(bad(&format!("names a file {:?}", image.name)));
        }
        let mut runs = Vec::with_capacity(image.runs.len() / 3);
        let (triples, rest) = image.runs.as_chunks::<3>();
        for [pack, first, count] in triples {
            let pack = pack.checked_sub(1).map(|pack| pack as usize);
            let end = u64::from(*first) + u64::from(*count);
            let known = pack.is_none_or(|pack| pages.get(pack).is_some_and(|pages| end <= *pages as u64));
            if *count == 0 || !known {
                return Err(bad("refers to pages that are not there"));
            }
            runs.push(Run { pack, first: *first, count: *count });
        }
        let image = Image { name: image.name, size: image.size, runs };
        if !rest.is_empty() || image.pages() != image.size.div_ceil(PAGE as u64) {
            return Err(bad("does not fit their sizes"));
        }
        images.push(image);
    }
    Ok(images)
}

/// CRIU's own names for images are of this kind; nothing else goes in, and nothing else is read.
pub(crate) fn is_image_name(name: &str) -> bool {
    !name.starts_with('.')
        && (1..=128).contains(&name.len())
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn neighbours_become_one_run() {
        let mut image = Image::new("pages-1.img".into(), 6 * PAGE as u64);
        for (pack, page) in [(Some(0), 4), (Some(0), 5), (None, 9), (None, 0), (Some(1), 6), (Some(1), 6)] {
            image.push(pack, page);
        }
        let run = |pack, first, count| Run { pack, first, count };
        assert_eq!(image.runs, [run(Some(0), 4, 2), run(None, 0, 2), run(Some(1), 6, 1), run(Some(1), 6, 1)]);
        let bytes = encode(std::slice::from_ref(&image)).unwrap();
        assert_eq!(decode(&bytes, &[6, 7]).unwrap(), [image]);
        assert!(decode(&bytes, &[5, 7]).is_err(), "a page that the first pack does not have");
        assert!(decode(&bytes, &[6]).is_err(), "a pack that is not there");
    }

    #[test]
    fn names_that_lead_elsewhere_are_refused() {
        for name in ["../pages-1.img", "a/b", "..", ".hidden", "", "x\0"] {
            let bytes = encode(&[Image::new(name.into(), 0)]).unwrap();
            assert!(decode(&bytes, &[]).is_err(), "{name:?}");
        }
        let twice = [Image::new("a.img".into(), 0), Image::new("a.img".into(), 0)];
        assert!(decode(&encode(&twice).unwrap(), &[]).is_err());
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_reader_panic(bytes: Vec<u8>, pages in proptest::collection::vec(0_usize..100, 0..4)) {
            let _ = decode(&bytes, &pages);
        }

        #[test]
        fn what_is_written_is_read(names in proptest::collection::hash_set("[a-z0-9]{1,9}\\.img", 0..9), runs in
            proptest::collection::vec((0_usize..3, 0_u32..9, 1_u32..9), 0..9)) {
            let image = |name: String| {
                let mut image = Image::new(name, 0);
                for (pack, first, count) in &runs {
                    let pack = pack.checked_sub(1);
                    image.runs.push(Run { pack, first: if pack.is_none() { 0 } else { *first }, count: *count });
                }
                image.size = image.pages() * PAGE as u64;
                image
            };
            let images: Vec<Image> = names.into_iter().map(image).collect();
            prop_assert_eq!(decode(&encode(&images).unwrap(), &[20, 20]).unwrap(), images);
        }

        #[test]
        fn an_image_name_is_one_normal_component(name in ".{0,20}") {
            if is_image_name(&name) {
                prop_assert_eq!(std::path::Path::new(&name).components().count(), 1);
                prop_assert!(!name.contains('/'));
            }
        }
    }
}
