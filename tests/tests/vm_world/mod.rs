//! What virtual machines need of fsd: exports of a layer and sockets that serve it, asked for over the
//! daemon's own interface; and the data space that an export has to show.
#![allow(dead_code)]

pub mod cpio;
pub mod guest;

use crate::fsd_world::World;
use anyhow::{Context, Result};
use layer::chunk::BLOCK_BYTES;
use proto::v1::layer_fs_client::LayerFsClient;
use proto::v1::{
    EndServeRequest, ExportRequest, ExportResponse, ServeRequest, ServeResponse, WithdrawRequest,
};
use tokio::runtime::Runtime;
use tonic::transport::Channel;

/// Asks the fsd of a world.
pub struct Exporter {
    runtime: Runtime,
}

impl Exporter {
    pub fn new() -> Result<Self> {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        Ok(Self { runtime })
    }

    fn client(&self, world: &World) -> Result<LayerFsClient<Channel>> {
        let socket = world.run_folder().join("fsd.sock");
        Ok(LayerFsClient::new(self.runtime.block_on(proto::connect::unix(&socket))?))
    }

    pub fn export(&self, world: &World, holder: &str) -> Result<ExportResponse> {
        let layer_id = world.layer.id.as_bytes().to_vec();
        let request = ExportRequest { layer_id, holder: holder.into() };
        let answer = self.runtime.block_on(self.client(world)?.export(request));
        Ok(answer.with_context(|| world.log())?.into_inner())
    }

    /// Whether the files are gone.
    pub fn withdraw(&self, world: &World, holder: &str) -> Result<bool> {
        let layer_id = world.layer.id.as_bytes().to_vec();
        let request = WithdrawRequest { layer_id, holder: holder.into() };
        Ok(self.runtime.block_on(self.client(world)?.withdraw(request))?.into_inner().gone)
    }

    pub fn serve(&self, world: &World, holder: &str) -> Result<ServeResponse> {
        let layer_id = world.layer.id.as_bytes().to_vec();
        let request = ServeRequest { layer_id, holder: holder.into() };
        let answer = self.runtime.block_on(self.client(world)?.serve(request));
        Ok(answer.with_context(|| world.log())?.into_inner())
    }

    pub fn end_serve(&self, world: &World, holder: &str) -> Result<()> {
        let layer_id = world.layer.id.as_bytes().to_vec();
        let request = EndServeRequest { layer_id, holder: holder.into() };
        self.runtime.block_on(self.client(world)?.end_serve(request))?;
        Ok(())
    }
}

/// The layer's data space: its files in order, each from a block of its own on.
pub fn data_space(world: &World) -> Vec<u8> {
    let mut data = Vec::new();
    for content in world.layer.files.values() {
        data.extend_from_slice(content);
        data.resize(data.len().next_multiple_of(BLOCK_BYTES as usize), 0);
    }
    data
}

/// `sha256sum`'s line for every file, sorted by name.
pub fn sums(world: &World) -> Result<Vec<String>> {
    let folder = world.folder.path().join("expected");
    std::fs::create_dir_all(&folder)?;
    for (name, content) in &world.layer.files {
        std::fs::write(folder.join(name), content)?;
    }
    let output = std::process::Command::new("sha256sum")
        .args(world.layer.files.keys())
        .current_dir(&folder)
        .output()?;
    std::fs::remove_dir_all(&folder)?;
    Ok(String::from_utf8(output.stdout)?.lines().map(str::to_owned).collect())
}
